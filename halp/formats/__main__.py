"""Print a table of all registered formats."""

from halp.formats import Format, get, names

_COLUMNS = "{:<13} {:>5} {:>5} {:>11} {:>11} {:>11} {:>9}  {:<3} {:<3} {:<2}"


def table() -> str:
    """Return the table: a line a format."""
    head = ("format", "bits", "bias", "max", "normal", "subnormal", "roundoff", "inf", "NaN", "-0")
    lines = [_COLUMNS.format(*head)]
    lines += [_row(get(name)) for name in names()]
    lines += [
        "",
        "normal, subnormal: the smallest positive values of full and of reduced precision",
        "roundoff: largest relative error of rounding to nearest (fixed point: of the range)",
        "also: eXmY, like IEEE 754 with X exponent and Y fraction bits; fixedB, two's complement",
        "mx*: blocks of 32 with a shared power-of-two scale; bits include its share",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _row(format: Format) -> str:
    return _COLUMNS.format(
        format.name,
        f"{format.bits:g}",
        getattr(format, "bias", "-"),
        f"{format.max:.6g}",
        f"{format.smallest_normal:.4g}",
        f"{format.smallest_subnormal:.4g}",
        f"{format.unit_roundoff:.2g}",
        *("yes" if has else "no" for has in (format.has_infinity, format.has_nan)),
        "yes" if format.has_negative_zero else "no",
    )


if __name__ == "__main__":
    print(table())
