"""What there is, for the terminal: the encodings with their options, and which architecture takes which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

SHARED_OPTIONS = ("rope_theta", "original_max_position_embeddings")


def option_lines(row: Any) -> list[str]:
    """One line an option: required, its default, or its choices."""
    from dataclasses import MISSING, fields
    from typing import Literal, get_args, get_origin, get_type_hints

    from hf_posenc.encodings import ADD_ONS

    hints, lines = get_type_hints(row.cls), []
    for field in fields(row.cls):
        if field.name in (*SHARED_OPTIONS, *ADD_ONS):
            continue
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        kinds = (hints[field.name],) if get_origin(hints[field.name]) is Literal else kinds
        choices = [str(c) for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
        default = "" if field.default in (MISSING, None) else f"={field.default}"
        note = " (required)" if field.default is MISSING else f" ({' | '.join(choices)})" if choices else ""
        lines.append(f"{field.name}{default}{note}")
    return lines


def encodings_table() -> tuple[Table, str]:
    """Every encoding with its seam, its options and its source, and what goes for all rotations."""
    from rich.table import Table

    import hf_posenc

    table = Table(title="Encodings: hf_posenc.patch_model(model, NAME, **options)", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("options", no_wrap=True)
    for column in ("what it does", "source"):
        table.add_column(column)
    for row in hf_posenc.list_encodings():
        table.add_row(row.name, "\n".join(option_lines(row)), f"{row.seam}: {row.summary}", row.paper)
    shared = (
        "Every rotation also takes rope_theta (default: the host's) and original_max_position_embeddings, the trained "
        "length (default: the config's; BLOOM states none); and the add-ons resonance=True (wavelengths of whole "
        "tokens) and logn=True (far queries scaled by ln n / ln L), which alibi and nope take as well."
    )
    return table, shared


def support_table() -> tuple[Table, list[str]]:
    """How many encodings each architecture takes, and which not; how many pairs are refused, and each reason once."""
    from rich.table import Table

    import hf_posenc

    rows = hf_posenc.list_encodings()
    table = Table(title=f"Architectures (model_type), of {len(rows)} encodings", title_justify="left")
    for column in ("architecture", "takes", "refuses"):
        table.add_column(column, no_wrap=column == "architecture")
    reasons: dict[str, dict[str, list[str]]] = {}
    hosts = hf_posenc.list_architectures()
    refused = 0
    for architecture in hosts:
        answers = {row.name: hf_posenc.support(architecture, row.name) for row in rows}
        without = {name: answer.reason for name, answer in answers.items() if not answer.ok}
        table.add_row(architecture, "all" if not without else f"{len(rows) - len(without)}", ", ".join(without))
        for name, reason in without.items():
            reasons.setdefault(reason, {}).setdefault(name, []).append(architecture)
        refused += len(without)
    said = [f"{refused} of {len(hosts) * len(rows)} pairs are refused, each with a reason:"]
    for reason, names in reasons.items():
        on = sorted({host for found in names.values() for host in found})
        said.append(f"{', '.join(names)} on {', '.join(on)}: {reason}")
    return table, said
