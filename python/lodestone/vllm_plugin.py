# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls when it starts (entry point vllm.general_plugins): makes lodestone.vllm_attention known to it."""

from __future__ import annotations

PATH = "lodestone.vllm_attention.LodestoneAttentionBackend"


def register() -> None:
    """As the backend CUSTOM, and on the CPU, where vLLM takes no other name, as CPU_ATTN: both do nothing of their own unless asked."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, PATH)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, PATH)
