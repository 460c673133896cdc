"""One-step overlap: rollout r+1 is generated while rollout r trains, so samples are at most one update old."""

from __future__ import annotations

import sys

from miles.ray.cluster import Cluster
from miles.ray.driver_main import main


async def train(args) -> None:
    async with await Cluster.start(args) as cluster:
        await cluster.update_weights()  # engines start from weights that went through the trainer
        if args.num_rollout == 0 and args.eval_interval is not None:  # evaluation only
            await cluster.evaluate(cluster.start_rollout_id)
        for step in cluster.steps():
            if cluster.due.evaluate_before_train(step):
                await cluster.evaluate(step)
            batch = await cluster.generate(step)
            cluster.begin_generate(step + 1)
            await cluster.train(step, batch)
            if cluster.due.save(step):
                await cluster.save(step)
            if cluster.due.update(step):
                await cluster.generation_is_idle()  # an update never falls inside a batch
                await cluster.update_weights(step)
            if cluster.due.evaluate(step):
                await cluster.evaluate(step)
        cluster.summarize()


if __name__ == "__main__":
    sys.exit(main(train, driver="train_async.py"))
