"""Which modules cannot be trained privately, and their private replacements."""

# importing a kind's file registers it
from opacus.validators import batch_norm, data_parallel, embedding, gru, instance_norm, lstm, rnn  # noqa: F401
from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    NotYetSupportedModuleError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedError,
    UnsupportedModuleError,
)
from opacus.validators.module_validator import ModuleValidator
from opacus.validators.multihead_attention import fix, validate
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = [
    "IllegalModuleConfigurationError",
    "ModuleValidator",
    "NotYetSupportedModuleError",
    "ShouldReplaceModuleError",
    "UnsupportableModuleError",
    "UnsupportedError",
    "UnsupportedModuleError",
    "fix",
    "register_module_fixer",
    "register_module_validator",
    "validate",
]
