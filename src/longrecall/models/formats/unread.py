"""What is missing for the kinds of model that people bring and longrecall does not read: said in the refusal."""

from __future__ import annotations

_REASONS = {
    "every layer is softmax attention, so it has no recurrent state to enlarge": """
        afmoe apertus arcee bitnet bloom chatglm codegen cohere cohere2 ctrl cwm dbrx deepseek deepseek_v2 deepseek_v3
        deepseek_v32 deepseek_v4 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon flex_olmo
        gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text glm glm4 glm4_moe glm_moe_dsa gpt2
        gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense
        hunyuan_v1_moe internlm2 internlm3 jais2 jetmoe kimi_k2 kimi_k25 llama llama4 llama4_text llava longcat_flash
        mimo_v2_flash minicpm minicpm3 minimax_m2 ministral ministral3 mistral mistral3 mistral4 mixtral mllama mpt
        nanochat nemotron nsa olmo olmo2 olmo3 olmoe opt path_attn persimmon phi phi3 phimoe qwen qwen2 qwen2_5_vl
        qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar stablelm starcoder2 transformer
        vaultgemma xglm yi""",
    "it is an encoder, which reads a text as a whole, and has no recurrent state": """
        albert bart bert deberta deberta-v2 distilbert electra longformer modernbert mpnet roberta t5 xlm-roberta""",
    "a reader for the lower bound of its decay and for its latent attention with rotary channels is missing": """
        bailing_hybrid""",
    "a reader for its sparse attention and for the lower bound of its decay is missing": "glm5_next glm5_next_text",
    "a reader for what it has beside Gated DeltaNet is missing": "qwen4_exp qwen4_exp_text",
    "gated short convolution blocks are missing; they remember the last few tokens only": """
        lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl""",
    "lightning attention (linear attention with a fixed decay, a norm and a gate) is missing": """
        lightning_attn minimax minimax_m1 minimax_text_01""",
    "log-linear attention, whose state grows with the logarithm of the context, is missing": "log_linear_mamba2",
    "Mamba-3's recurrence (trapezoidal steps, complex decays, several inputs a step) is missing": "mamba3",
    "the solver inside its layers is missing": "mesa_net",
    "layers that are trained while they read are missing": "titans ttt",
    "layers on patches of bytes are missing": "blt",
    "layers that run several times with a state of their own are missing": "hrm_text",
    "compressed convolutional attention is missing": "zaya zaya1",
    "the recurrence of RWKV-5 (a matrix state under a fixed decay) is missing": "rwkv5",
    "a reader for Mamba beside attention with a window is missing": "samba",
    "its long convolutions in modal form are missing": "stripedhyena",
    "the matrix memory of xLSTM (exponential gates with a running maximum) is missing": "xlstm",
    "Mamba layers of several heads and the shared attention of Zamba 1 are missing": "zamba",
}
"""What is missing -> the model types that lack it."""
_MISSING = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}


def missing_part(*kinds: object) -> str | None:
    """Return what longrecall lacks to read the first of these model types that is known; None where none is."""
    return next((_MISSING[kind] for kind in kinds if isinstance(kind, str) and kind in _MISSING), None)
