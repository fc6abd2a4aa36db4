"""The first page's picture, standing still: for a browser that runs no scripts."""

DEVICES, PITCH, TOP, TALL = 8, 80, 118, 40


def still() -> str:
    """Eight devices: along a tree small states, round a ring whole shards; an SVG."""
    x = [PITCH * (r + 0.5) for r in range(DEVICES)]
    lines = []
    for bit in (1, 2, 4):
        for a in (r for r in range(DEVICES) if not r & bit):
            b, high = a + bit, 2 * (12 + 16 * bit)
            middle = (x[a] + x[b]) / 2
            way = f"M{x[a]} {TOP - 4}Q{middle} {TOP - 4 - high} {x[b]} {TOP - 4}"
            lines.append(f'<path d="{way}" fill="none" stroke="var(--tree)" opacity=".4"/>')
            lines.append(
                f'<circle cx="{middle}" cy="{TOP - 4 - high / 2}" r="2" fill="var(--tree)"/>'
            )
    for r, left in enumerate(x):
        box = f'x="{left - 30}" y="{TOP}" width="60" height="{TALL}"'
        lines.append(f'<rect {box} fill="var(--panel)" stroke="var(--soft)"/>')
        lines.append(f'<text x="{left}" y="{TOP + 25}" text-anchor="middle">{r}</text>')
        shard = f'x="{left + 8}" y="{TOP + TALL + 12}" width="36" height="36"'
        lines.append(f'<rect {shard} fill="var(--ring)" opacity=".75"/>')
    low = TOP + TALL + 74
    lines.append('<text x="0" y="14" fill="var(--tree)">tree: 3 rounds, states of 264 bytes</text>')
    lines.append(f'<text x="0" y="{low}">ring: 7 rounds, shards of 4,194,304 bytes</text>')
    about = (
        "Eight devices. Above, small states hop along a tree; below, large shards go round a ring."
    )
    size = f'viewBox="0 0 {PITCH * DEVICES} {low + 10}"'
    return f'<svg {size} role="img" aria-label="{about}">{"".join(lines)}</svg>'
