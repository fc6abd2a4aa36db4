"""python -m labs.acceptance: each rule on each drafted shape, every outcome enumerated."""

from labs.acceptance.models import SHAPES, TextModel, in_floats, rules_for
from labs.acceptance.optimum import most_tokens
from labs.acceptance.rules import largest_fault, mean_length, step_law


def table() -> str:
    """A row for each shape and rule: whether it is lossless, and its mean tokens of a step."""
    target, draft = TextModel(1), TextModel(2)
    lines = [f"{'drafted':<24}{'rule':<16}{'lossless':<18}tokens a step"]
    for shape, widths, replacement in SHAPES:
        for name, rule in rules_for(widths, replacement).items():
            exact = name != "k-sequential"  # its rho is computed in floats
            models = (target, draft) if exact else (in_floats(target), in_floats(draft))
            found = step_law(rule, *models, widths, replacement)
            fault = largest_fault(found, models[0])  # 0 if numbers are exact
            lossless = (
                "in fractions" if exact and fault == 0 else "in floats" if fault < 1e-12 else "no"
            )
            lines.append(f"{shape:<24}{name:<16}{lossless:<18}{float(mean_length(found)):.4f}")
        _, bound = most_tokens(target, draft, widths, replacement)
        lines.append(f"{shape:<24}{'(any rule)':<16}{'':<18}{float(bound):.4f} at most")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
