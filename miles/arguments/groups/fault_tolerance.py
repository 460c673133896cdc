"""What happens when engines or trainer ranks die."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Fault tolerance")
class FaultToleranceArgs:
    use_fault_tolerance: bool = flag(
        False, "Probe engines for hangs too. Engines that died are restarted with or without it."
    )
    ft_components: list[str] = flag(
        ["rollout"],
        "What is watched.",
        choices=("rollout", "train"),
        owner="fault-tolerance",
        later={"train": "ft-trainer"},
    )
    rollout_health_check_interval: float = flag(
        30.0, "Seconds between probes of an engine.", gt=0, owner="fault-tolerance"
    )
    rollout_health_check_timeout: float = flag(
        30.0, "Seconds that an engine has to answer.", gt=0, owner="fault-tolerance"
    )
    rollout_health_check_first_wait: float = flag(
        0.0, "Nothing.", ge=0, dead="an engine is probed from the moment it has answered for the first time"
    )


@group("Fault-tolerant trainer", system="ft-trainer")
class FtTrainerArgs:
    control_server_port: int = flag(0, "Port of the control server; 0 for none.", ge=0, le=65535)
    mini_ft_controller_enable: bool = flag(False, "Restart failed trainer cells.")
    mini_ft_controller_poll_interval: float = flag(10.0, "Seconds between its looks.", gt=0)
    mini_ft_controller_resume_delay: float = flag(10.0, "Seconds before a restart.", ge=0)
    trainer_heartbeat_checker_interval: float = flag(10.0, "Seconds between heartbeats.", gt=0)
    trainer_heartbeat_checker_timeout: float = flag(10.0, "Seconds to answer one.", gt=0)
    trainer_heartbeat_checker_first_wait: float = flag(300.0, "Seconds before the first.", ge=0)
    trainer_heartbeat_checker_failure_threshold: int = flag(3, "Missed ones after which a rank is dead.", ge=1)
    ci_ft_test_actions: str | None = flag(None, "Faults to cause, as JSON.", metavar="JSON")
    non_persistent_ckpt_type: str | None = flag(
        None, "Kind of local checkpoint.", choices=("global", "local", "in_memory")
    )
    non_persistent_local_ckpt_dir: str | None = flag(None, "Folder of local checkpoints.", metavar="DIR")
    non_persistent_local_ckpt_algo: str = flag(
        "fully_parallel", "How they are written.", choices=("fully_parallel", "atomic")
    )
