"""What a setting is: a bounded type, and a field that says its unit and meaning."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Tokens = Annotated[int, Field(ge=1, le=1_048_576)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


def knob(default: Any, unit: str, text: str, published: str = "", **bounds: Any) -> Any:
    """A field with its unit, and the published flag it stands for where there is one."""
    extra: dict[str, Any] = {"unit": unit, "published": published}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


class Section(BaseModel):
    """A group of settings: immutable, without unknown names or silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
