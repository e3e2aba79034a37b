// Draws each picture with its title, and leaves it in the document as text, where whoever started the browser finds it.

const TITLE_HEIGHT = 30, LINE_HEIGHT = 17, LETTER_WIDTH = 6.3; // In pixels.

function folded(text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if ((lines.at(-1).length + word.length) * LETTER_WIDTH > width) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) && " ") + word;
  }
  return lines;
}

async function exportAll() {
  const { theme, format, width, scale, words } = JSON.parse(document.getElementById("export").textContent);
  for (const [name, figure] of Object.entries(pictures.figures)) {
    const element = document.getElementById(name), [text, caption] = words[name], lines = folded(caption, width - 40);
    const above = TITLE_HEIGHT + LINE_HEIGHT * lines.length + 14, height = figure.layout.height + above;
    const place = { xref: "container", yref: "container", x: 0, xanchor: "left", y: 1, yanchor: "top" };
    const subtitle = { text: lines.join("<br>"), font: { size: 12 } };
    const title = { text, subtitle, font: { size: 16 }, pad: { l: 14, t: 12 }, ...place };
    element.style.width = `${width}px`;
    await draw(element, { data: figure.data, layout: { ...figure.layout, height, width, title } }, theme);
    // A legend grows from the picture upwards, so what stands above it needs room beyond the legend's own.
    const legend = element._fullLayout.showlegend ? element._fullLayout.legend._height : 0;
    await Plotly.relayout(element, { "margin.t": above + legend });
    if (isTimeline(figure)) await writeTexts(element);
    element.dataset.image = await Plotly.toImage(element, { format, width, height, scale });
    Plotly.purge(element);
  }
}

unpackPlotly().then(exportAll).catch((error) => { document.body.dataset.trouble = String(error); });
