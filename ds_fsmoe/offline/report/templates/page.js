/* SPDX-License-Identifier: Apache-2.0 */
"use strict";
// Draws the charts of the page in its colours, moves and zooms them, and switches between light and dark.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const views = new Map();

  const isDark = () => {
    const asked = root.dataset.theme;
    return asked ? asked === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };

  // A colour of the style sheet as it is in the theme of now.
  const colour = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };

  const config = () => {
    const [ink, quiet, grid] = ["ink", "quiet", "grid"].map(colour);
    const font = "system-ui, sans-serif";
    const words = { labelColor: quiet, titleColor: ink, labelFont: font, titleFont: font, titleFontWeight: 500 };
    return {
      background: "transparent",
      font,
      view: { stroke: null },
      axis: { ...words, gridColor: grid, domainColor: grid, tickColor: grid, labelFontSize: 12, titleFontSize: 12 },
      legend: { ...words, labelColor: ink, labelFontSize: 12, titleFontSize: 12, symbolStrokeWidth: 3 },
      title: { color: ink, font, anchor: "start", fontSize: 13, fontWeight: 600 },
      text: { color: ink },
    };
  };

  const draw = async (place) => {
    const spec = JSON.parse(document.getElementById(place.dataset.spec).textContent);
    const options = { config: config(), renderer: "svg", tooltip: { theme: "custom" }, actions: false };
    try {
      const { view } = await vegaEmbed(place, spec, options);
      views.get(place.id)?.finalize();
      views.set(place.id, view);
      place.dataset.drawn = "yes";
    } catch (error) {
      place.textContent = `This chart cannot be drawn: ${error.message}`;
      place.dataset.drawn = "failed";
    }
  };

  const move = (view, what) => {
    if (what === "all") return view.signal("zoom_x", null).runAsync();
    const [first, last] = view.scale("x").domain();
    const length = last - first;
    const [from, to] = {
      in: [first + length / 4, last - length / 4],
      out: [first - length / 2, last + length / 2],
      left: [first - length / 4, last - length / 4],
      right: [first + length / 4, last + length / 4],
    }[what];
    return view.signal("zoom_x", [from, to]).runAsync();
  };

  for (const tools of document.querySelectorAll(".tools")) {
    tools.addEventListener("click", (event) => {
      const view = views.get(`chart-${tools.dataset.chart}`);
      if (view && event.target.dataset.do) move(view, event.target.dataset.do);
    });
  }

  const label = () => { button.textContent = isDark() ? "light" : "dark"; };
  const redraw = () => {
    label();
    for (const id of views.keys()) draw(document.getElementById(id));
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  label();

  // What nobody has scrolled to is not drawn yet.
  const places = [...document.querySelectorAll(".chart")];
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "600px" });
  places.forEach((each) => seen.observe(each));
  addEventListener("beforeprint", () => places.filter((each) => !each.dataset.drawn).forEach(draw));
  window.fsmoePage = { views };
})();
