"""Names of the options of SGLang's server (0.5.16 to 0.5.21) and router (0.3.2), by the kind of their value.

Kinds: switch (no value), negatable (`--x` or `--no-x`), int, float, text, and their plurals for several values; pairs may
be repeated. Options that this project sets itself (ports, model path, seeds, memory saver, ...) are not among them.
"""

from __future__ import annotations

SERVER_OPTIONS: dict[str, str] = {
    "switch": """
        abort_on_priority_when_disabled allow_auto_truncate checkpoint_engine_wait_weights_before_ready
        collect_tokens_histogram constrained_json_disable_any_whitespace debug_cuda_graph delete_ckpt_after_loading
        disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill disable_attn_tp_gather
        disable_chunked_prefix_cache disable_cuda_graph disable_cuda_graph_padding disable_custom_all_reduce
        disable_decode_cuda_graph disable_fast_image_processor disable_flashinfer_autotune
        disable_flashinfer_cutlass_moe_fp4_allgather disable_hybrid_swa_memory disable_outlines_disk_cache
        disable_overlap_schedule disable_piecewise_cuda_graph disable_prefill_cuda_graph disable_priority_preemption
        disable_radix_cache disable_shared_experts_fusion disable_tokenizer_batch_decode
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
        disaggregation_enable_kv_checksum elastic_ep_rejoin enable_adaptive_dispatch_to_encoder
        enable_aiter_allreduce_fusion enable_attn_tp_input_scattered enable_breakable_cuda_graph
        enable_broadcast_mm_inputs_process enable_cache_report enable_cp_decode_attn_tp enable_cudagraph_gc
        enable_custom_logit_processor enable_decoder_swa_bounded_replay enable_deepseek_v4_fp4_indexer
        enable_dense_mlp_attn_tp enable_deterministic_inference enable_dp_attention
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_draft_weights_cpu_backup
        enable_dsa_cache_layer_split enable_dsa_prefill_context_parallel enable_dynamic_batch_tokenizer
        enable_dynamic_chunking enable_elastic_expert_backup enable_encoder_swa_bounded_replay enable_eplb
        enable_expert_distribution_metrics enable_flashinfer_allreduce_fusion enable_flexkv
        enable_forward_pass_metrics enable_fp32_lm_head enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope
        enable_gdn_replayssm_spec enable_hierarchical_cache enable_hisparse enable_http2
        enable_int8_mamba_checkpoint enable_layernorm_sp enable_layerwise_nvtx_marker enable_lean_attention
        enable_linear_replayssm enable_linear_replayssm_spec enable_linker_mla_dedup enable_lmcache enable_lora
        enable_lora_overlap_loading enable_mamba_cache_stochastic_rounding enable_metrics
        enable_metrics_for_all_schedulers enable_mfu_metrics enable_mis enable_mixed_chunk enable_mm_global_cache
        enable_mscclpp enable_multi_layer_eagle enable_multimodal enable_nccl_nvls enable_p2p_check
        enable_page_major_kv_layout enable_pd_role_switch enable_pdmux enable_precise_embedding_interpolation
        enable_prefill_context_parallel enable_prefill_cp enable_prefill_delayer enable_prefix_mm_cache
        enable_priority_scheduling enable_profile_cuda_graph enable_quant_communications
        enable_request_time_stats_logging enable_response_store enable_return_hidden_states enable_scattered_sconv
        enable_session_radix_cache enable_shared_experts_attn_tp enable_single_batch_overlap enable_ssl_refresh
        enable_streaming_session enable_strict_thinking enable_symm_mem enable_tf32_matmul
        enable_tokenizer_batch_encode enable_torch_compile enable_torch_compile_debug_mode enable_torch_symm_mem
        enable_trace enable_two_batch_overlap enable_unified_cache_external_linker enable_unified_memory
        enable_w4a4_mxfp4_megamoe enable_waterfill enable_weights_cpu_backup encoder_only
        enforce_disable_flashinfer_allreduce_fusion enforce_piecewise_cuda_graph enforce_shared_experts_fusion
        export_metrics_to_file flashinfer_mla_disable_ragged grpc_mode incremental_streaming_output is_embedding
        keep_mm_feature_on_device language_model_only language_only log_requests lora_use_virtual_experts
        mlx_enable_sampling mm_enable_dp_encoder pre_warm_nccl prefill_only_disable_kv_cache
        prefill_round_robin_balance quantize_and_serve remote_instance_weight_loader_start_seed_via_transfer_engine
        return_input_ids return_output_ids schedule_low_priority_values_first show_time_cost skip_tokenizer_init
        sleep_on_idle smg_grpc_mode speculative_adaptive speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_skip_dp_mlp_sync speculative_use_rejection_sampling stream_response_default_include_usage
        strip_thinking_cache triton_attention_reduce_in_fp32 trust_mm_content_hashes trust_request_chat_template
        use_ray weight_loader_disable_mmap weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints
    """,
    "negatable": """
        dcp_replicate_q_proj dllm_fdfo enable_tp_lm_head_all_to_all experts_shared_outer_loras lora_strict_loading
        ple_offload_embedding
    """,
    "int": """
        asr_max_buffer_seconds asr_max_concurrent_sessions attn_cp_size batch_notify_size c128_page_size
        chunked_prefill_size constrained_json_max_whitespace_cnt context_length cpu_offload_gb
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
        cuda_graph_prefill_max_context dcp_size decode_log_interval decoupled_spec_rank default_priority_value
        detokenizer_worker_num disaggregation_bootstrap_port disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval dist_timeout dp_size dwdp_size dynamic_batch_tokenizer_batch_size
        elastic_ep_initial_size encoder_bootstrap_port engine_info_bootstrap_port ep_join_rank_offset
        ep_num_redundant_experts ep_size eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations
        expert_distribution_recorder_buffer_size gated_launch_port grpc_port grpc_response_timeout_secs hicache_size
        hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
        http2_initial_connection_window_size http2_max_concurrent_streams int8_mamba_ckpt_size kt_cpuinfer
        kt_max_deferred_experts_per_token kt_num_gpu_experts kt_threadpool_count kv_canary_sweep_interval
        linear_replayssm_cache_len load_snapshot_publish_interval log_requests_level mamba_cache_philox_rounds
        mamba_max_states_per_path mamba_track_interval max_ep_size max_loaded_loras max_lora_chunk_size
        max_lora_rank max_loras_per_batch max_mamba_cache_size max_prefill_tokens max_queued_requests
        max_running_requests max_total_tokens media_url_max_file_size_mb min_free_slots_delay mm_io_worker_num
        mm_preprocess_cache_size_mb mm_processor_worker_num moe_dense_tp_size moe_dp_size
        num_continuous_decode_steps num_reserved_decode_tokens offload_group_size offload_num_in_group
        offload_prefetch_step optimistic_prefill_attempts page_size pp_async_batch_depth pp_max_micro_batch_size
        pp_size prefill_decode_interval prefill_delayer_max_delay_passes prefill_max_requests
        priority_scheduling_preemption_threshold remote_instance_weight_loader_seed_instance_service_port
        sampling_mask_max_tokens scheduler_recv_interval shared_experts_tp_size sm_group_num smg_http_sidecar_port
        speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_draft_sink_size
        speculative_draft_window_size speculative_dspark_block_size speculative_eagle_topk
        speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens
        speculative_ngram_external_sam_budget speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth
        speculative_ngram_min_bfs_breadth speculative_num_draft_tokens speculative_num_steps stream_interval
        swa_prefix_tails tokenizer_worker_num torch_compile_max_bs tp_size triton_attention_num_kv_splits
        triton_attention_split_tile_size weight_cache_timeout weight_loader_prefetch_num_threads
    """,
    "float": """
        disaggregation_decode_host_receive_threshold dynamic_batch_tokenizer_batch_timeout elastic_ep_scale_timeout
        eplb_min_rebalancing_utilization_threshold gc_warning_threshold_secs hicache_host_memory_fraction
        hicache_ratio lora_drain_wait_threshold mamba_full_memory_ratio mem_fraction_static
        prefill_delayer_max_delay_ms prefill_delayer_queue_min_ratio prefill_delayer_token_usage_low_watermark
        schedule_conservativeness soft_watchdog_timeout speculative_accept_threshold_acc
        speculative_accept_threshold_single swa_full_tokens_ratio tbo_token_distribution_threshold watchdog_timeout
    """,
    "text": """
        admin_api_key api_key attention_backend bf16_gemm_backend boundary_reduction chat_template
        completion_template constrained_json_whitespace_pattern cp_strategy crash_dump_folder
        cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_config cuda_graph_tc_compiler
        custom_pull_weights_pre_read_hook dcp_comm_backend debug_tensor_dump_input_file
        debug_tensor_dump_output_folder decode_attention_backend decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_role decrypted_config_file decrypted_draft_config_file
        deepep_config deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode default_chat_template_kwargs device
        disaggregation_decode_retraction_backup disaggregation_ib_device disaggregation_mode
        disaggregation_transfer_backend dllm_algorithm dllm_algorithm_config download_dir dsa_decode_backend
        dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_prefill_cp_mode dsa_topk_backend dsv4_attn_backend
        dsv4_prefill_backend dtype elastic_ep_backend encoder_transfer_backend ep_dispatch_algorithm ep_join_mode
        eplb_algorithm expert_balancedness_report_mode expert_distribution_recorder_mode export_metrics_to_file_dir
        extra_metric_labels fastapi_root_path file_storage_path flashinfer_a2a_dispatch_type
        flashinfer_allreduce_fusion_backend flashinfer_mxfp4_moe_precision flexkv_config_file forward_hooks
        forward_pass_metrics_ipc_name forward_pass_metrics_worker_id fp4_gemm_runner_backend fp8_gemm_runner_backend
        fuseep_mode grammar_backend hf_chat_template_name hicache_host_memory_mode hicache_io_backend
        hicache_mem_layout hicache_storage_backend hicache_storage_backend_extra_config
        hicache_storage_prefetch_policy hicache_write_policy hisparse_config host image_processor_backend
        init_expert_location json_model_override_args kt_method kt_weight_path kv_cache_dtype kv_canary
        kv_canary_real_data kv_events_config limit_mm_data_per_request linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend lmcache_config_file
        load_balance_method load_format load_publish_endpoint log_level log_level_http log_requests_format
        lora_backend lora_eviction_policy mamba_backend mamba_radix_cache_strategy mamba_ssm_dtype
        mm_attention_backend mm_feature_transport mm_global_cache_backend mm_process_config model_checksum
        model_config_parser model_impl model_loader_extra_config modelexpress_config
        modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path modelopt_quant
        moe_a2a_backend moe_runner_backend mooncake_ib_device msprobe_dump_config offload_mode otlp_service_name
        otlp_traces_endpoint pdmux_config_path ple_offload_backend ple_offload_dir preferred_sampling_params
        prefill_attention_backend prefill_cp_mode prefill_kv_cache_dequant_dtype quantization
        quantization_param_path radix_cache_backend radix_eviction_policy radix_eviction_policy_config
        reasoning_parser remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_send_weights_group_ports retraction_policy return_hidden_states_mode revision
        rl_on_policy_target rl_quant_profile sampling_backend sampling_defaults schedule_policy served_model_name
        sidecar sidecar_args spec_trace_dir speculative_adaptive_config speculative_algorithm
        speculative_attention_mode speculative_draft_attention_backend speculative_draft_kv_cache_dtype
        speculative_draft_load_format speculative_draft_model_path speculative_draft_model_quantization
        speculative_draft_model_revision speculative_dsa_topk_backend speculative_dspark_confidence_sts_path
        speculative_dspark_sps_table_path speculative_moe_a2a_backend speculative_moe_runner_backend
        speculative_ngram_external_corpus_path speculative_ngram_match_type speculative_token_map ssl_ca_certs
        ssl_certfile ssl_keyfile ssl_keyfile_password startup_weight_load_mode tokenizer_backend
        tokenizer_metrics_custom_labels_header tokenizer_mode tokenizer_path tool_call_parser tool_server
        torchao_config trace_modules true_on_policy_contract unified_cache_external_linker_backend uno_lora_path
        warmups weight_cache_mode weight_cache_socket weight_version
    """,
    "ints": """
        cuda_graph_bs_decode cuda_graph_bs_prefill debug_tensor_dump_layers gc_threshold numa_node
    """,
    "floats": """
        bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
    """,
    "texts": """
        allowed_media_domains custom_weight_loader encoder_register_urls encoder_urls flashinfer_autotune_skip_ops
        generation_tokens_buckets log_requests_target lora_paths lora_target_modules prompt_tokens_buckets
        tokenizer_metrics_allowed_custom_labels uvicorn_access_log_exclude_prefixes
    """,
}

# Other spellings of a server option.
SERVER_ALIASES: dict[str, tuple[str, ...]] = {
    "attn_cp_size": ("attention_context_parallel_size",),
    "cuda_graph_bs_decode": ("cuda_graph_bs",),
    "cuda_graph_bs_prefill": ("piecewise_cuda_graph_tokens",),
    "cuda_graph_max_bs_decode": ("cuda_graph_max_bs",),
    "cuda_graph_max_bs_prefill": ("piecewise_cuda_graph_max_tokens",),
    "cuda_graph_prefill_max_context": ("context_bucket",),
    "cuda_graph_tc_compiler": ("piecewise_cuda_graph_compiler",),
    "dcp_size": ("decode_context_parallel_size",),
    "dp_size": ("data_parallel_size",),
    "dsa_decode_backend": ("nsa_decode_backend",),
    "dsa_prefill_backend": ("nsa_prefill_backend",),
    "dsa_prefill_cp_mode": ("nsa_prefill_cp_mode",),
    "enable_dsa_prefill_context_parallel": ("enable_nsa_prefill_context_parallel",),
    "ep_join_mode": ("elastic_ep_join_mode",),
    "ep_join_rank_offset": ("elastic_ep_join_rank_offset",),
    "ep_size": ("ep", "expert_parallel_size"),
    "fp4_gemm_runner_backend": ("fp4_gemm_backend",),
    "fp8_gemm_runner_backend": ("fp8_gemm_backend",),
    "hisparse_config": ("hierarchical_sparse_attention_extra_config",),
    "incremental_streaming_output": ("stream_output",),
    "mamba_radix_cache_strategy": ("mamba_scheduler_strategy",),
    "moe_dp_size": ("moe_data_parallel_size",),
    "pp_size": ("pipeline_parallel_size",),
    "smg_http_sidecar_port": ("grpc_http_sidecar_port",),
    "speculative_draft_model_path": ("speculative_draft_model",),
    "speculative_draft_window_size": ("speculative_dflash_draft_window_size",),
    "tp_size": ("tensor_parallel_size",),
}

ROUTER_OPTIONS: dict[str, str] = {
    "switch": """
        control_plane_audit_enabled disable_circuit_breaker disable_health_check disable_retries dp_aware enable_igw
        enable_trace mini_lb pd_disaggregation service_discovery tokenizer_cache_enable_l0 tokenizer_cache_enable_l1
    """,
    "int": """
        balance_abs_threshold bucket_adjust_interval_secs cb_failure_threshold cb_success_threshold
        cb_timeout_duration_secs cb_window_duration_secs eviction_interval_secs health_check_interval_secs
        health_check_timeout_secs health_failure_threshold health_success_threshold max_concurrent_requests
        max_idle_secs max_payload_size max_tree_size oracle_pool_max oracle_pool_min oracle_pool_timeout_secs
        postgres_pool_max prometheus_port queue_size queue_timeout_secs rate_limit_tokens_per_second redis_pool_max
        redis_retention_days request_timeout_secs retry_initial_backoff_ms retry_max_backoff_ms retry_max_retries
        service_discovery_port shutdown_grace_period_secs tokenizer_cache_l0_max_entries
        tokenizer_cache_l1_max_memory worker_startup_check_interval worker_startup_timeout_secs
    """,
    "float": """
        balance_rel_threshold cache_threshold retry_backoff_multiplier retry_jitter_factor
    """,
    "text": """
        api_key assignment_mode backend chat_template client_cert_path client_key_path decode_policy
        health_check_endpoint history_backend jwt_audience jwt_issuer jwt_jwks_uri log_dir log_level mcp_config_path
        model_path oracle_connect_descriptor oracle_password oracle_tns_alias oracle_username oracle_wallet_path
        otlp_traces_endpoint policy postgres_db_url prefill_policy prometheus_host reasoning_parser redis_url
        service_discovery_namespace tls_cert_path tls_key_path tokenizer_path tool_call_parser
    """,
    "floats": """
        prometheus_duration_buckets
    """,
    "texts": """
        ca_cert_paths control_plane_api_keys cors_allowed_origins decode_selector jwt_role_mapping prefill_selector
        request_id_headers selector
    """,
    "pairs": """
        decode prefill
    """,
}
