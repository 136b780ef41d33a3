"""Table of golden cases: tiny configs with the keys of the published ones, and their purposes."""
from golden import Case


def qwen3_moe(**changes):
    """A tiny Qwen3-MoE config. The vocabulary is odd: rows of a matrix need no alignment."""
    return dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=64, num_hidden_layers=3,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=32,
        rms_norm_eps=1e-6, vocab_size=259, rope_theta=1000000.0, tie_word_embeddings=False,
        max_position_embeddings=4096, norm_topk_prob=True, rope_scaling=None, hidden_act="silu",
        attention_bias=False, eos_token_id=1, bos_token_id=0) | changes


def qwen3_vl_moe(**changes):
    """The nested config of a tiny Qwen3-VL-MoE."""
    rope = dict(rope_type="default", mrope_interleaved=True, mrope_section=[6, 5, 5])
    text = qwen3_moe(model_type="qwen3_vl_moe_text", moe_intermediate_size=64, rope_theta=5000000.0, rope_scaling=rope)
    return dict(architectures=["Qwen3VLMoeForConditionalGeneration"], model_type="qwen3_vl_moe",
                text_config=text | changes, tie_word_embeddings=False, eos_token_id=1)


def qwen3_5_text(**changes):
    """A tiny text config of Qwen3.5-MoE. `interval` and `rotary` set the keys derived from them."""
    interval, rotary = changes.pop("interval", 4), changes.pop("rotary", 0.25)
    types = changes.pop("types", True)
    config = dict(
        model_type="qwen3_5_moe_text", hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4, num_experts=8,
        num_experts_per_tok=2, shared_expert_intermediate_size=32, moe_intermediate_size=32, rms_norm_eps=1e-6,
        vocab_size=259, max_position_embeddings=4096, tie_word_embeddings=False, attention_bias=False,
        attn_output_gate=True, full_attention_interval=interval, hidden_act="silu", norm_topk_prob=True,
        mamba_ssm_dtype="float32", eos_token_id=1,
        rope_parameters=dict(mrope_interleaved=True, mrope_section=[3, 3, 2], partial_rotary_factor=rotary,
                             rope_theta=10000000, rope_type="default")) | changes
    if types:
        config["layer_types"] = ["linear_attention" if (i + 1) % interval else "full_attention"
                                 for i in range(config["num_hidden_layers"])]
    return config


def qwen3_5_moe(**changes):
    """The nested config of Qwen3.5-MoE, as the vision-language checkpoints have it."""
    text = qwen3_5_text(**changes)
    return dict(architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", text_config=text,
                tie_word_embeddings=text["tie_word_embeddings"], eos_token_id=1)


def qwen3_5_flat(**changes):
    """The same without `text_config`, as text-only exports have it."""
    return qwen3_5_text(**changes) | dict(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe")


def yarn(**changes):
    """DeepSeek's `rope_scaling`."""
    return dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                original_max_position_embeddings=4096, type="yarn") | changes


def deepseek_v3(**changes):
    """A tiny DeepSeek-V3 config: one dense layer, two groups of four chosen."""
    return dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=259, hidden_size=64,
        intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, n_shared_experts=1, n_routed_experts=16, routed_scaling_factor=2.5, kv_lora_rank=64,
        q_lora_rank=64, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32, topk_method="noaux_tc",
        scoring_func="sigmoid", norm_topk_prob=True, n_group=4, topk_group=2, num_experts_per_tok=3, moe_layer_freq=1,
        first_k_dense_replace=1, max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000.0,
        rope_scaling=yarn(), attention_bias=False, hidden_act="silu", tie_word_embeddings=False, eos_token_id=1,
        bos_token_id=0) | changes


def kimi_k2(**changes):
    """Kimi-K2: one group, and a YaRN whose two edges are the same."""
    return deepseek_v3(model_type="kimi_k2", n_group=1, topk_group=1, rope_theta=50000.0,
                       rope_scaling=yarn(beta_fast=1.0, beta_slow=1.0, factor=32.0)) | changes


def deepseek_v32(**changes):
    """DeepSeek-V3.2: the indexer chooses few of the positions."""
    return deepseek_v3(architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", index_head_dim=32,
                       index_n_heads=8, index_topk=16) | changes


def glm_moe_dsa(**changes):
    """GLM-5: plain RoPE, one group, interleaved RoPE in the indexer too."""
    config = deepseek_v32(
        architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa", n_group=1, topk_group=1, rope_scaling=None,
        rope_parameters=dict(rope_theta=1000000, rope_type="default"), rope_interleave=True,
        indexer_rope_interleave=True, rms_norm_eps=1e-5, head_dim=16, qk_head_dim=48)
    del config["rope_theta"]
    return config | changes


def glm4_moe(**changes):
    """A tiny GLM-4.5 config."""
    return dict(
        architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", vocab_size=259, hidden_size=64,
        intermediate_size=96, max_position_embeddings=4096, moe_intermediate_size=32, norm_topk_prob=True,
        num_attention_heads=4, n_group=1, head_dim=32, topk_group=1, n_shared_experts=1, n_routed_experts=8,
        routed_scaling_factor=1.0, num_experts_per_tok=3, first_k_dense_replace=1, num_hidden_layers=3,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=1000000, rope_scaling=None, use_qk_norm=True,
        tie_word_embeddings=False, attention_bias=True, partial_rotary_factor=0.5, hidden_act="silu", eos_token_id=1,
        pad_token_id=0) | changes


def gpt_oss(**changes):
    """A tiny gpt-oss config, its window shorter than the prompt."""
    layers = changes.get("num_hidden_layers", 2)
    return dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_hidden_layers=layers, num_local_experts=8,
        num_experts_per_tok=3, vocab_size=259, rms_norm_eps=1e-5, hidden_size=64, intermediate_size=32, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8, rope_theta=150000.0, swiglu_limit=7.0,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                          rope_type="yarn", truncate=False),
        layer_types=["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)],
        attention_bias=True, max_position_embeddings=131072, hidden_act="silu", tie_word_embeddings=False,
        eos_token_id=1, pad_token_id=0) | changes


def minimax_m2(**changes):
    """A tiny MiniMax-M2 config."""
    return dict(
        architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2", hidden_size=64, intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, num_experts_per_tok=3,
        num_local_experts=8, shared_intermediate_size=0, num_hidden_layers=2, rms_norm_eps=1e-6, rope_theta=5000000,
        rotary_dim=16, vocab_size=259, tie_word_embeddings=False, scoring_func="sigmoid", head_dim=32,
        use_qk_norm=True, use_routing_bias=True, qk_norm_type="per_layer", hidden_act="silu",
        eos_token_id=1) | changes


def qwen3_next(**changes):
    """A tiny Qwen3-Next config."""
    return dict(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", hidden_size=64, num_hidden_layers=3,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
        num_experts=8, num_experts_per_tok=3, decoder_sparse_step=1, shared_expert_intermediate_size=32,
        mlp_only_layers=[], moe_intermediate_size=32, rms_norm_eps=1e-6, vocab_size=259, rope_theta=10000000.0,
        partial_rotary_factor=0.25, max_position_embeddings=4096, norm_topk_prob=True, tie_word_embeddings=False,
        attention_bias=False, rope_scaling=None, full_attention_interval=3, hidden_act="silu", eos_token_id=1,
        bos_token_id=0) | changes


def bailing_moe(**changes):
    """A tiny Ling-lite 1.5: a softmax router, no norms of queries and keys."""
    return dict(
        architectures=["BailingMoeForCausalLM"], model_type="bailing_moe", hidden_size=64, num_hidden_layers=3,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=3,
        num_shared_experts=2, moe_intermediate_size=32, first_k_dense_replace=1, norm_topk_prob=True,
        max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=600000, rope_scaling=None, vocab_size=259,
        hidden_act="silu", use_bias=False, use_qkv_bias=False, norm_head=False, norm_softmax=False, multi_gate=False,
        pretraining_tp=1, tie_word_embeddings=False, pad_token_id=1, eos_token_id=1) | changes


def bailing_moe_v2(**changes):
    """A tiny Ling-mini 2.0: the router of DeepSeek-V3, norms per head, RoPE on half of it."""
    return bailing_moe(
        architectures=["BailingMoeV2ForCausalLM"], model_type="bailing_moe_v2", num_experts=16, num_shared_experts=1,
        n_group=4, topk_group=2, use_qk_norm=True, head_dim=16, rotary_dim=8, partial_rotary_factor=0.5,
        score_function="sigmoid", router_dtype="fp32", moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=32, routed_scaling_factor=2.5, num_nextn_predict_layers=0,
        use_rmsnorm=True) | changes


def gemma4(**changes):
    """A tiny Gemma-4-26B-A4B: nested, experts beside a dense MLP; in full layers values are
    keys."""
    layers = changes.get("num_hidden_layers", 3)
    text = dict(
        attention_bias=False, attention_dropout=0.0, attention_k_eq_v=True, bos_token_id=0, dtype="bfloat16",
        enable_moe_block=True, eos_token_id=1, final_logit_softcapping=30.0, global_head_dim=64, head_dim=32,
        hidden_activation="gelu_pytorch_tanh", hidden_size=64, hidden_size_per_layer_input=0, intermediate_size=96,
        layer_types=["full_attention" if i == layers - 1 else "sliding_attention" for i in range(layers)],
        max_position_embeddings=262144, model_type="gemma4_text", moe_intermediate_size=32, num_attention_heads=4,
        num_experts=8, num_global_key_value_heads=1, num_hidden_layers=layers, num_key_value_heads=2,
        num_kv_shared_layers=0, pad_token_id=0, rms_norm_eps=1e-6,
        rope_parameters=dict(
            full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
            sliding_attention=dict(rope_theta=10000.0, rope_type="default")),
        sliding_window=8, tie_word_embeddings=True, top_k_experts=3, use_bidirectional_attention="vision",
        use_cache=True, use_double_wide_mlp=False, vocab_size=259, vocab_size_per_layer_input=259) | changes
    # mlx-lm reads the vocabulary size from the outer config.
    return dict(architectures=["Gemma4ForConditionalGeneration"], audio_config=None, boi_token_id=255,
                dtype="bfloat16", eos_token_id=[1], image_token_id=256, model_type="gemma4", text_config=text,
                tie_word_embeddings=True, vocab_size=text["vocab_size"])


def granitemoe(**changes):
    """A tiny Granite-3 MoE. All four factors differ from 1, and the scores' from 1 / sqrt(16)."""
    return dict(
        architectures=["GraniteMoeForCausalLM"], model_type="granitemoe", hidden_size=64, num_hidden_layers=3,
        intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
        num_experts_per_tok=3, attention_multiplier=0.15, embedding_multiplier=1.5, residual_multiplier=0.4,
        logits_scaling=3.0, rms_norm_eps=1e-6, vocab_size=259, rope_theta=10000.0, rope_scaling=None,
        max_position_embeddings=4096, tie_word_embeddings=True, attention_bias=False, attention_dropout=0.0,
        hidden_act="silu", output_router_logits=False, router_aux_loss_coef=0.0, use_cache=True, bos_token_id=0,
        eos_token_id=1, pad_token_id=0) | changes


CASES = {
    # Granite 3 in both layouts: mlx-lm has routers, o_proj and the experts' down_proj in 8 bits.
    "granitemoe": Case(granitemoe()),
    "granitemoe_hub": Case(granitemoe(num_hidden_layers=2, tie_word_embeddings=False), layout="hub", prompt=16,
                           steps=6),
    # Ling 1.x in both layouts: dense layers or none; 2.0 with groups and a correction.
    "bailing_moe_group_32": Case(bailing_moe(num_hidden_layers=2), group=32),
    "bailing_moe_hub": Case(bailing_moe(num_hidden_layers=2, first_k_dense_replace=0, norm_topk_prob=False,
                                        tie_word_embeddings=True), layout="hub", prompt=16, steps=6),
    "bailing_moe_v2_hub": Case(bailing_moe_v2(), layout="hub", prompt=16, steps=6),
    # 3 bits, with 6 for lm_head and some v_proj and down_proj; the router has 3. Query width is not
    # the hidden size.
    "qwen3_moe_mixed_3_6": Case(
        qwen3_moe(hidden_size=128, num_attention_heads=6, num_key_value_heads=2, num_experts=6,
                  moe_intermediate_size=64),
        recipe="mixed_3_6", bits=3, group=64),
    # A dense layer by name, tied embeddings, top-k weights not normalized, k = 1, as many KV heads
    # as heads.
    "qwen3_moe_dense_tied": Case(
        qwen3_moe(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, intermediate_size=160,
                  mlp_only_layers=[1], tie_word_embeddings=True, norm_topk_prob=False, num_experts_per_tok=1),
        bits=5, group=32, dtype="f16", overrides={"mlp.gate": (8, 32)}),
    # Every second layer dense, all experts but one chosen, 2 bits in groups of 128 (except head and
    # router).
    "qwen3_moe_sparse_step": Case(
        qwen3_moe(hidden_size=128, num_hidden_layers=4, intermediate_size=256, decoder_sparse_step=2, num_experts=7,
                  num_experts_per_tok=6, moe_intermediate_size=128),
        bits=2, group=128, overrides={"lm_head": (4, 128), "k_proj": (3, 128)}),
    # Six settings in one model, none of them listed in the config: bits and group size follow from
    # the shapes.
    "qwen3_moe_inferred": Case(
        qwen3_moe(hidden_size=128, num_hidden_layers=2, moe_intermediate_size=64, num_experts_per_tok=3),
        bits=4, group=64, dtype="f32", map="nothing",
        overrides={"lm_head": (8, 128), "embed_tokens": (6, 64), "v_proj": (8, 32), "o_proj": (5, 32),
                   "switch_mlp.down_proj": (6, 32), "switch_mlp.up_proj": (3, 128)}),
    # 8 bits over five shards; the map says `false` for the router and the head, which stay bf16.
    # One KV head.
    "qwen3_moe_shards": Case(
        qwen3_moe(num_key_value_heads=1, num_experts=9, num_experts_per_tok=4, eos_token_id=[1, 0]),
        bits=8, group=32, shards=5, overrides={"mlp.gate": None, "lm_head": None}),
    # Unquantized f32, experts stacked; every expert is chosen.
    "qwen3_moe_plain_f32": Case(
        qwen3_moe(num_hidden_layers=2, head_dim=16, num_experts=4, num_experts_per_tok=4, rope_theta=10000.0,
                  rms_norm_eps=1e-5),
        layout="mlx-plain", dtype="f32"),
    # The text model of a vision-language one.
    "qwen3_vl_moe": Case(qwen3_vl_moe(), overrides={"mlp.gate": (8, 64)}),
    "qwen3_vl_moe_hub": Case(qwen3_vl_moe(), layout="hub"),
    # Hub layout: one bf16 tensor per expert and projection, an expert's three in three shards; a
    # dense layer.
    "qwen3_moe_hub": Case(
        qwen3_moe(mlp_only_layers=[0], num_experts=6, num_experts_per_tok=3, num_key_value_heads=4, head_dim=24),
        layout="hub", shards=3),
    # Hub layout: fused experts, A_log and gated norm in f32, tensors of vision and of multi-token
    # prediction.
    "qwen3_5_moe_hub": Case(
        qwen3_5_moe(interval=3, num_hidden_layers=3, num_experts=5, num_experts_per_tok=3),
        layout="hub", shards=2, state_dtype="f32", extras=True),
    # Hub layout, text only: flat config, f16, tied, value heads wider than key heads, conv of width
    # 3.
    "qwen3_5_moe_hub_text": Case(
        qwen3_5_flat(interval=2, num_hidden_layers=3, linear_num_key_heads=1, linear_num_value_heads=2,
                     linear_value_head_dim=48, linear_conv_kernel_dim=3, tie_word_embeddings=True, num_experts=5),
        layout="hub", dtype="f16", prefix="model."),
    # Flat config, tied, no layer_types, one value head per key head, rotary on half a head, conv of
    # width 3.
    "qwen3_5_moe_flat_tied": Case(
        qwen3_5_flat(interval=2, types=False, rotary=0.5, hidden_size=96, linear_num_key_heads=3,
                     linear_num_value_heads=3, linear_conv_kernel_dim=3, tie_word_embeddings=True,
                     norm_topk_prob=False, num_key_value_heads=4),
        bits=4, group=32, overrides={"mlp.gate": (8, 32), "shared_expert_gate": (8, 32)}),
    # Four value heads per key head, keys wider than values, rotary on the whole head of 48, a last
    # linear layer, k = 1.
    "qwen3_5_moe_ratio_4": Case(
        qwen3_5_moe(interval=3, rotary=1.0, num_hidden_layers=4, head_dim=48, linear_num_key_heads=1,
                    linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=32,
                    num_experts_per_tok=1, shared_expert_intermediate_size=64),
        bits=6, group=32, extras=True,
        overrides={"down_proj": (8, 32), "v_proj": (3, 64), "in_proj_qkv": (5, 64), "embed_tokens": (4, 32)}),
    # mlx-lm's 2-and-6-bit recipe in groups of 128, f16 scales, conv of width 5.
    "qwen3_5_moe_mixed_2_6": Case(
        qwen3_5_moe(interval=3, hidden_size=128, num_hidden_layers=3, moe_intermediate_size=128, num_experts=4,
                    shared_expert_intermediate_size=128, linear_conv_kernel_dim=5, num_attention_heads=8),
        recipe="mixed_2_6", bits=2, group=128, dtype="f16"),
    # Groups of 64 that do not divide the inputs of out_proj (96) or o_proj (96): those stay bf16 in
    # a quantized model. The attention has biases.
    "qwen3_5_moe_odd_group": Case(
        qwen3_5_moe(interval=3, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
                    linear_key_head_dim=48, linear_value_head_dim=48, linear_num_value_heads=2,
                    linear_num_key_heads=1, moe_intermediate_size=64, num_experts_per_tok=7,
                    shared_expert_intermediate_size=64, attention_bias=True),
        bits=5, group=64, shards=2, map="nothing"),
    # Unquantized f32, flat, stacked; a convolution of width 2, the minimum.
    "qwen3_5_moe_plain_f32": Case(
        qwen3_5_flat(interval=2, num_hidden_layers=2, head_dim=16, rotary=0.5, linear_key_head_dim=16,
                     linear_value_head_dim=24, linear_conv_kernel_dim=2, num_experts=3, rms_norm_eps=1e-5),
        layout="mlx-plain", dtype="f32"),
    # --- Other formats on the simplest model: 32 values and an E8M0 scale, 16 and an E4M3 scale, 32
    # and E4M3 values.
    "qwen3_moe_mxfp4": Case(qwen3_moe(num_hidden_layers=2), mode="mxfp4", group=32, overrides={"mlp.gate": (8, 64)}),
    "qwen3_moe_nvfp4": Case(qwen3_moe(num_hidden_layers=2, head_dim=24), mode="nvfp4", group=16,
                            overrides={"mlp.gate": (8, 64)}),
    "qwen3_moe_mxfp8": Case(qwen3_moe(num_hidden_layers=2), mode="mxfp8", bits=8, group=32,
                            overrides={"mlp.gate": None}),
    # The Hub's FP8 in 128x128 blocks, with matrices that are not whole blocks.
    "qwen3_moe_hub_fp8": Case(
        qwen3_moe(num_hidden_layers=1, hidden_size=144, num_experts=3, moe_intermediate_size=136), layout="hub",
        mode="fp8", shards=2),
    # --- DeepSeek's family. `kv_b_proj` whole in 4 bits, two groups to a row, as in the export of
    # Cogito-V2; the correction bias in bf16 and so low that a group masked with 0 would win.
    "deepseek_v3_kv_b_4bit": Case(
        deepseek_v3(kv_lora_rank=128, num_hidden_layers=2, moe_intermediate_size=64), kv_b_proj=(4, 64),
        bias_dtype="bf16", shift={"e_score_correction_bias": -1.0}, map="nothing",
        overrides={"embed_q": None, "unembed_out": None}),
    # No low-rank queries, two shared experts, no dense layer, three head sizes, mscale unlike
    # mscale_all_dim, weights not normalized.
    "deepseek_v3_direct_q": Case(
        deepseek_v3(q_lora_rank=None, n_shared_experts=2, n_routed_experts=8, v_head_dim=48, qk_rope_head_dim=24,
                    num_hidden_layers=2, first_k_dense_replace=0, routed_scaling_factor=1.7, norm_topk_prob=False,
                    rope_scaling=yarn(mscale=0.8, mscale_all_dim=0.5, factor=16)),
        bits=8, group=32),
    # Hub layout: one tensor per expert and projection, `kv_b_proj` plain, a layer of multi-token
    # prediction to skip.
    "deepseek_v3_hub": Case(
        deepseek_v3(num_hidden_layers=2, n_routed_experts=8, num_nextn_predict_layers=1, ep_size=1), layout="hub",
        shards=2, extras=True, bias_dtype="bf16"),
    # As published by DeepSeek: FP8 in 128x128 blocks, `kv_b_proj` too.
    "deepseek_v3_hub_fp8": Case(
        deepseek_v3(num_hidden_layers=1, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
                    first_k_dense_replace=0, hidden_size=144, moe_intermediate_size=136),
        layout="hub", mode="fp8"),
    "kimi_k2_betas": Case(kimi_k2(n_routed_experts=12, num_experts_per_tok=5, attention_bias=True), group=32),
    # The indexer chooses 16 of up to 212 positions.
    "deepseek_v32_long": Case(deepseek_v32(num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1),
                              group=32, prompt=200, keep=16),
    "glm_moe_dsa_long": Case(
        glm_moe_dsa(num_hidden_layers=2, n_routed_experts=8, index_n_heads=16, attention_bias=True), group=32,
        prompt=120, keep=16),
    # Beyond 4,096 positions, of which the indexer chooses 64. One layer, so that a small gap in an
    # early row, which cannot be avoided, affects no other row.
    "deepseek_v32_4200": Case(
        deepseek_v32(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=4, n_group=1, topk_group=1,
                     num_experts_per_tok=2, index_n_heads=8, index_topk=64),
        group=32, prompt=4200, steps=4, keep=4, any_seed=True),
    # GLM-5.2: layers without an indexer use the positions of an earlier one.
    "glm_moe_dsa_shared": Case(
        glm_moe_dsa(num_hidden_layers=4, n_routed_experts=6, indexer_types=["full", "shared", "full", "shared"],
                    index_topk_freq=2, index_skip_topk_offset=1, index_topk=8),
        group=32, prompt=40, keep=20),
    # --- GLM-4.5. Without norms of queries and keys and without biases; two groups.
    "glm4_moe_plain": Case(
        glm4_moe(use_qk_norm=False, attention_bias=False, partial_rotary_factor=0.25, n_group=2, topk_group=1,
                 first_k_dense_replace=0, num_hidden_layers=2, routed_scaling_factor=2.5),
        bits=6, group=32, shift={"e_score_correction_bias": -0.8}),
    "glm4_moe_hub": Case(glm4_moe(num_hidden_layers=2, num_nextn_predict_layers=1), layout="hub", extras=True),
    # --- gpt-oss: experts in MXFP4 and the rest in 8 bits, as in MLX; as published by OpenAI; long.
    "gpt_oss_mxfp4": Case(
        gpt_oss(), mode="mxfp4", group=32,
        overrides={p: (8, 64, "affine") for p in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj",
                                                   "mlp.router")}),
    "gpt_oss_hub": Case(gpt_oss(num_local_experts=6), layout="hub", shards=2),
    "gpt_oss_long": Case(gpt_oss(num_hidden_layers=3, sliding_window=16, swiglu_limit=1.5), group=32, prompt=300,
                         keep=16),
    # Beyond 4,096 positions: YaRN, and windows whose ring is overwritten many times.
    "gpt_oss_4200": Case(
        gpt_oss(num_hidden_layers=2, sliding_window=100, num_local_experts=4, num_experts_per_tok=2), group=32,
        prompt=4200, steps=4, keep=4),
    # --- MiniMax-M2.
    "minimax_m2_hub": Case(minimax_m2(), layout="hub", shards=2, bias_dtype="bf16"),
    "minimax_m2_plain": Case(
        minimax_m2(use_qk_norm=False, tie_word_embeddings=True, rotary_dim=32, num_experts_per_tok=1), bits=5, group=32,
        shift={"e_score_correction_bias": -0.5}),
    # --- Qwen3-Next: the delta-net's projections fused and in the order of its key heads.
    "qwen3_next_hub": Case(qwen3_next(num_hidden_layers=2, full_attention_interval=2, num_experts=5), layout="hub",
                           shards=2, state_dtype="f32"),
    "qwen3_next_dense_tied": Case(
        qwen3_next(mlp_only_layers=[1], tie_word_embeddings=True, linear_num_key_heads=1, linear_num_value_heads=4,
                   linear_value_head_dim=48, norm_topk_prob=False, partial_rotary_factor=0.5),
        bits=6, group=32, overrides={"mlp.gate": (8, 32), "shared_expert_gate": (8, 32)}),
    # --- Gemma 4, 26B-A4B.
    "gemma4": Case(gemma4(), shift={"post_attention_layernorm.weight": 2.0, "post_feedforward_layernorm.weight": 2.0}),
    "gemma4_hub": Case(
        gemma4(num_hidden_layers=2, attention_k_eq_v=True, num_experts=6, sliding_window=12), layout="hub", shards=2,
        shift={"post_attention_layernorm.weight": 2.0, "post_feedforward_layernorm.weight": 2.0}, extras=True),
    "gemma4_own_values": Case(
        gemma4(num_hidden_layers=2, attention_k_eq_v=False, top_k_experts=1, sliding_window=5, global_head_dim=48,
               final_logit_softcapping=10.0, num_key_value_heads=4),
        bits=8, group=32, overrides={"router.proj": (8, 32)},
        shift={"post_attention_layernorm.weight": 2.0, "post_feedforward_layernorm.weight": 2.0}),
}
