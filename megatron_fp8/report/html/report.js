"use strict";
// Draws the figures of the page from its data, in the colours of the reader's mode.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  // Its buttons would lie on the curves; dragging and double-clicking do what matters.
  const config = { responsive: true, displayModeBar: false };
  const viridis = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
  const hiddenTraces = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const palette = (number) => colour(`c${number % 8}`);

  function layout(extra) {
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
    const { xaxis, yaxis, ...rest } = extra;
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("quiet") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      margin: { l: 8, r: 12, t: 10, b: 8 },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 }, namelength: -1 },
      xaxis: { ...axis, tickformat: ",d", title: { text: "iteration", standoff: 6 }, ...xaxis },
      yaxis: { ...axis, ...yaxis },
      ...rest,
    };
  }

  // Ticks at whole iterations, also where there are few.
  function iterations(values, atMost) {
    const first = values.reduce((a, b) => Math.min(a, b), Infinity);
    const last = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const few = last - first < atMost ? { tickmode: "linear", tick0: first, dtick: 1 } : { nticks: atMost };
    return first === last ? { ...few, range: [first - 1, last + 1] } : few;
  }

  function drawCurves(figure) {
    const hidden = hiddenTraces.get(figure.id);
    const traces = figure.traces.map((trace, index) => ({
      type: "scatter", name: trace.name, x: trace.x, y: trace.y, mode: trace.mode, connectgaps: false,
      visible: !hidden.has(index),
      line: { color: palette(trace.colour), width: 1.8, dash: trace.dash },
      marker: { color: palette(trace.colour), size: 6 },
      hovertemplate: "%{y:.5g}",
    }));
    const rangemode = figure.from_zero ? "tozero" : "normal";
    const yaxis = { type: figure.log ? "log" : "linear", rangemode, exponentformat: "power", title: { text: figure.axis, standoff: 8 } };
    return Plotly.react(figure.id, traces, layout({ hovermode: "x unified", xaxis: { hoverformat: ",d", ...iterations(figure.traces.flatMap((trace) => trace.x), 6) }, yaxis }), config);
  }

  function legend(figure) {
    const list = document.querySelector(`[data-for="${figure.id}"]`);
    list.replaceChildren(...(figure.traces.length < 2 ? [] : figure.traces).map((trace, index) => {
      const button = document.createElement("button");
      const dashes = { solid: "", dash: "7 4", dot: "2 3" }[trace.dash];
      button.innerHTML = `<svg width="26" height="10" aria-hidden="true"><path d="M1 5H25" fill="none" stroke="var(--c${trace.colour % 8})" stroke-width="3" stroke-dasharray="${dashes}"/></svg><span></span>`;
      // The names are escaped for plotly; this takes the entities back, and nothing else.
      button.lastChild.innerHTML = trace.name;
      button.setAttribute("aria-pressed", "true");
      button.title = "Show or hide";
      button.addEventListener("click", () => {
        const hidden = hiddenTraces.get(figure.id);
        hidden.has(index) ? hidden.delete(index) : hidden.add(index);
        button.setAttribute("aria-pressed", String(!hidden.has(index)));
        drawCurves(figure);
      });
      const item = document.createElement("li");
      item.append(button);
      return item;
    }));
  }

  function drawHeat() {
    const choice = data.heat[Number(document.getElementById("quantity").value)];
    const value = (z) => (z === null ? "–" : Number((choice.log2 ? 2 ** z : z).toPrecision(3)).toString());
    document.getElementById("low").textContent = value(choice.low);
    document.getElementById("high").textContent = value(choice.high);
    document.getElementById("gradient").style.background = `linear-gradient(to right, ${viridis.join(",")})`;
    document.getElementById("heat-says").textContent =
      [choice.says, choice.log2 ? "Colours are on a logarithmic scale." : ""].filter(Boolean).join(" ");
    const grid = document.getElementById("heat");
    for (const plot of grid.querySelectorAll(".plot")) Plotly.purge(plot);
    grid.replaceChildren();
    return Promise.all(choice.maps.map((map, index) => drawMap(grid, choice, map, index)));
  }

  function drawMap(grid, choice, map, index) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.innerHTML = `<h3>${map.tensor.replace(/[./]/g, "$&<wbr>")}</h3>`;
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.id = `heat-${index}`;
    plot.style.height = `${Math.max(150, Math.min(340, 90 + 12 * map.y.length))}px`;
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `Heat map by layer and iteration of ${caption.textContent}: ${choice.label}`);
    figure.append(caption, plot);
    grid.append(figure);
    const spread = choice.high > choice.low ? 0 : 0.5;
    const trace = {
      type: "heatmap", x: map.x, y: map.y, z: map.z, zmin: choice.low - spread, zmax: choice.high + spread, showscale: false,
      colorscale: viridis.map((stop, place) => [place / (viridis.length - 1), stop]),
      hovertemplate: `layer %{y}, iteration %{x:,d}: <b>${choice.log2 ? "2<sup>%{z:.2f}</sup>" : "%{z:.4g}"}</b><extra></extra>`,
    };
    const yaxis = { title: { text: "layer", standoff: 6 }, tickformat: "d", nticks: 6, showgrid: false };
    if (map.y.length < 6) Object.assign(yaxis, { tickmode: "array", tickvals: map.y });
    const xaxis = { showgrid: false, ...iterations(map.x, 5) };
    return Plotly.newPlot(plot, [trace], layout({ xaxis, yaxis }), config);
  }

  async function loadPlotly() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  async function drawAll() {
    await Promise.all(data.figures.map(drawCurves));
    if (data.heat.length) await drawHeat();
  }

  async function main() {
    for (const figure of data.figures) {
      hiddenTraces.set(figure.id, new Set());
      legend(figure);
    }
    await loadPlotly();
    await drawAll();
    if (data.heat.length) document.getElementById("quantity").addEventListener("change", drawHeat);
    dark.addEventListener("change", drawAll);
    document.documentElement.dataset.drawn = "yes";
  }

  main().catch((error) => {
    const failed = document.getElementById("failed");
    failed.hidden = false;
    failed.textContent = `The figures could not be drawn: ${error}. The tables are complete. A browser of 2023 or later is needed.`;
    console.error(error);
  });
})();
