"""PowerGrad Transform for Axolotl: a plugin that applies `powergrad.transformers`."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from powergrad.transformers import apply

__all__ = ["PowerGradPlugin"]


class PowerGradArguments(BaseModel):
    """What the plugin adds to the configuration."""

    powergrad_alpha: float


class PowerGradPlugin(BasePlugin):
    """``plugins: [powergrad.axolotl.PowerGradPlugin]`` and ``powergrad_alpha`` in the YAML file."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the arguments."""
        return "powergrad.axolotl.PowerGradArguments"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Apply it after the model was loaded, before adapters and sharding."""
        apply(model, cfg.powergrad_alpha)
