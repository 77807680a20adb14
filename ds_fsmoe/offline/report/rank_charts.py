# SPDX-License-Identifier: Apache-2.0
"""Describes charts of the rows that each rank computes, as bars of its experts."""

from __future__ import annotations

from collections.abc import Sequence

from ds_fsmoe.offline.report.charts import QUIET, ROWS, Chart, chart_of, colours_of, library
from ds_fsmoe.offline.report.palette import OTHER

_MOST_COLOURED = 6


def draw_ranks(panels: Sequence[tuple[str, Sequence[Sequence[tuple[int, float]]]]]) -> list[Chart]:
    """Return a chart for each panel, all to one scale: bars of ranks, cut into their experts.

    The experts with most rows have colours, the same in all panels.

    Args:
        panels: the title of each chart, and for each rank (expert, rows).
    """
    alt = library()
    total: dict[int, float] = {}
    for expert, rows in (each for ranks in panels[0][1] for each in ranks) if panels else ():
        total[expert] = total.get(expert, 0.0) + rows
    hottest = [str(each) for each in sorted(total, key=lambda each: (-total[each], each))[:_MOST_COLOURED]]
    colours = colours_of(hottest, 1)
    highest = max((sum(rows for _, rows in ranks) for _, of_ranks in panels for ranks in of_ranks), default=1.0)
    found = []
    for title, of_ranks in panels:
        loads = [sum(rows for _, rows in ranks) for ranks in of_ranks]
        mean = sum(loads) / len(loads)
        over = f": fullest rank {max(loads) / mean:.2f} times the mean" if mean else ""
        data = [
            {
                "x": rank,
                "y": rows,
                "order": -rows,
                "expert": str(expert),
                "kind": str(expert) if str(expert) in colours else "others",
            }
            for rank, ranks in enumerate(of_ranks)
            for expert, rows in ranks
        ]
        scale = alt.Scale(domain=[*colours, "others"], range=[*colours.values(), OTHER])
        bars = alt.Chart(alt.NamedData(ROWS)).mark_bar()
        bars = bars.encode(
            x=alt.X("x:O", title="rank", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("y:Q", title="rows of a call", scale=alt.Scale(domain=[0, highest], nice=False)),
            color=alt.Color("kind:N", scale=scale, legend=alt.Legend(title="expert", orient="bottom")),
            order="order:Q",
            tooltip=[
                alt.Tooltip("x:O", title="rank"),
                alt.Tooltip("expert:N", title="expert"),
                alt.Tooltip("y:Q", title="rows of a call", format=",.4~g"),
            ],
        )
        even = alt.Chart(alt.NamedData("mean")).mark_rule(color=QUIET, strokeDash=[2, 3]).encode(y="y:Q")
        about = f"rows of each rank by expert, {title}"
        chart = alt.layer(bars, even).properties(title=f"{title}{over}")
        found.append(chart_of(about, chart, {ROWS: data, "mean": [{"y": mean}]}, 180))
    return found
