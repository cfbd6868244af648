(function () {
  "use strict";
  var plots = JSON.parse(document.getElementById("plots").textContent);
  var root = document.documentElement;
  var options = { responsive: true, displayModeBar: false };

  function colour(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

  // Colours of text and lines are the page's, light or dark; those of the data are in the figures.
  function themed(given) {
    var layout = JSON.parse(JSON.stringify(given));
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--ink") };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.hoverlabel = { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--ink") } };
    Object.keys(layout).forEach(function (key) {
      if (/^[xy]axis\d*$/.test(key)) {
        layout[key].gridcolor = layout[key].zerolinecolor = colour("--grid");
        layout[key].linecolor = colour("--line");
      }
    });
    (layout.shapes || []).forEach(function (shape) { shape.line.color = colour("--soft"); });
    return layout;
  }

  function draw() {
    return Promise.all(plots.map(function (plot) {
      return Plotly.react(plot.id, plot.data, themed(plot.layout), options);
    }));
  }

  function onPaper(yes) { root.classList.toggle("on-paper", yes); draw(); }

  draw().then(function () { root.dataset.drawn = String(plots.length); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (each) { each.open = true; });
    onPaper(true);
  });
  window.addEventListener("afterprint", function () { onPaper(false); });
})();
