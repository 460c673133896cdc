"""The run folder, metrics and where they go."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("Run folder and metrics")
class LoggingArgs:
    run_name: str | None = flag(None, "Name of the run. Unset: the model's name and the time.")
    run_dir: str | None = flag(None, "Folder of metrics, plan, plots and logs. Unset: runs/<run name>.", metavar="DIR")
    log_multi_turn: bool = flag(False, "Metrics of turns.", system="sessions")
    log_passrate: bool = flag(False, "Log pass@k of complete groups.")
    log_reward_category: str | None = flag(None, "Reward-dict entry whose values are counted.", metavar="KEY")
    log_correct_samples: bool = flag(False, "Log trainer-side metrics of correct samples separately.")
    env_report: str | None = flag(
        None, "File that facts about the environment are written to.", metavar="FILE", system="recorded-checks"
    )


@group("Weights & Biases", owner="wandb")
class WandbArgs:
    use_wandb: bool = flag(False, "Log to Weights & Biases.")
    wandb_mode: str | None = flag(None, "online, offline or disabled.", choices=("online", "offline", "disabled"))
    wandb_dir: str | None = flag(None, "Folder of its files.", metavar="DIR")
    wandb_key: str | None = flag(
        None, "API key. Better: set WANDB_API_KEY, which no process list shows.", neutral=("",)
    )
    wandb_host: str | None = flag(None, "Address of a private server.", metavar="URL")
    wandb_team: str | None = flag(None, "Team (entity).")
    wandb_group: str | None = flag(None, "Group of runs.")
    wandb_project: str | None = flag(None, "Project.")
    wandb_run_name: str | None = flag(None, "Name shown for the run. Unset: --run-name.")
    wandb_run_id: str | None = flag(None, "Continue this run. Checkpoints remember it.")
    wandb_random_suffix: bool = flag(
        True, "Do not add random letters to the run's name.", off="--disable-wandb-random-suffix"
    )
    wandb_always_use_train_step: bool = flag(False, "Count evaluations in optimizer steps instead of rollouts.")


@group("TensorBoard", owner="tensorboard")
class TensorboardArgs:
    use_tensorboard: bool = flag(False, "Write TensorBoard event files.")
    tb_project_name: str | None = flag(None, "Folder name of the project.")
    tb_experiment_name: str | None = flag(None, "Folder name of the run. Unset: --run-name.")
    tensorboard_dir: str | None = flag(
        None, "Folder of event files. Unset: tensorboard below the run folder.", metavar="DIR"
    )


@group("MLflow", system="mlflow", owner="mlflow")
class MlflowArgs:
    use_mlflow: bool = flag(False, "Log to MLflow.")
    mlflow_tracking_uri: str | None = flag(None, "Address of the server.", metavar="URL")
    mlflow_experiment_name: str = flag("miles", "Experiment.")
    mlflow_run_name: str | None = flag(None, "Unset: --wandb-group.")
    mlflow_run_id: str | None = flag(None, "Continue this run.")


@group("Prometheus", system="prometheus", owner="prometheus")
class PrometheusArgs:
    use_prometheus: bool = flag(False, "Serve metrics to Prometheus.")
    prometheus_port: int | None = flag(None, "Port. Unset: from the environment, or 9090.", ge=1, le=65535)
    prometheus_run_name: str | None = flag(None, "Label of the run.")


@group("Dashboard", system="dashboard", owner="dashboard")
class DashboardArgs:
    use_miles_dashboard: bool = flag(False, "Serve the run's web page; needs --dump-details.")
    dashboard_flush_interval: float = flag(5.0, "Seconds between writes.", gt=0)
    dashboard_gpu_sample_interval: float = flag(1.0, "Seconds between GPU samples.", gt=0)
    dashboard_sglang_scrape_interval: float = flag(2.0, "Seconds between looks at the engines.", gt=0)
    dashboard_sglang_scrape_mode: str = flag(
        "auto", "Where engine metrics are read.", choices=("auto", "router", "direct")
    )
    dashboard_sglang_metrics: list[str] | None = flag(None, "Engine metrics to keep.")
    dashboard_forward_prometheus: bool = flag(False, "Pass engine metrics on to Prometheus.")
