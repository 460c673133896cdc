"""Low-rank adapters, one or many."""

from __future__ import annotations

from miles.arguments.flag import flag, group


@group("LoRA", system="lora", owner="lora")
class LoraArgs:
    lora_rank: int = flag(0, "Rank of the adapter; 0 trains all weights.", ge=0)
    lora_alpha: float = flag(16, "Scale: the adapter counts alpha / rank.", gt=0)
    lora_dropout: float = flag(0.0, "Dropout of the adapter's input.", ge=0, lt=1)
    lora_type: str = flag("lora", "Adapters on fused projections, or on each.", choices=("lora", "canonical_lora"))
    target_modules: str | None = flag(None, "Modules with adapters, separated by commas, or all-linear.")
    exclude_modules: str | None = flag(None, "Modules without, separated by commas.")
    lora_adapter_path: str | None = flag(None, "Adapter to start from.", metavar="DIR")
    lora_base_cpu_backup: bool = flag(False, "Keep the base weights on the host while offloaded.")
    lora_train_only: bool = flag(False, "Do not send the adapter to the engines.")
    experts_shared_outer_loras: bool = flag(False, "Share the outer factors among experts.")
    sglang_lora_use_virtual_experts: bool = flag(True, "Serve expert adapters through virtual experts.", negatable=True)


@group("Multi-LoRA", system="multi-lora", owner="multi-lora")
class MultiLoraArgs:
    multi_lora_n_adapters: int = flag(0, "Adapters trained at the same time.", ge=0)
    multi_lora_adapter: list[str] | None = flag(
        None, "One adapter and its config; may be repeated.", nargs=2, append=True, metavar=("NAME", "CONFIG")
    )
    multi_lora_idle_poll_s: float = flag(5.0, "Seconds between looks for new work.", gt=0)
    multi_lora_http_server_path: str | None = flag(None, "Subclass of MultiLoRAHTTPServer.")
    multi_lora_backend_path: str | None = flag(None, "Subclass of MultiLoRABackend.")
    multi_lora_api_port: int = flag(8068, "Port of the adapter service.", ge=1, le=65535)
    multi_lora_disable_service_mode: bool = flag(False, "End when the given adapters are trained.")
    multi_lora_max_adapter_global_batch_size: int | None = flag(
        None, "Largest batch of one adapter. Unset: 4 times --global-batch-size.", ge=1
    )
    multi_lora_max_coalesce_wait_s: float = flag(0.5, "Seconds to wait for more adapters to join a step.", ge=0)
    multi_lora_max_empty_wait_s: float = flag(30.0, "Seconds to wait for any data.", ge=0)
