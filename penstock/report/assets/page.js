// Draws the pictures of a page, anew when the reader's system turns dark or light, and says what is under the pointer.

const dark = matchMedia("(prefers-color-scheme: dark)");
const drawn = new Set();

async function drawOne(element) {
  const figure = pictures.figures[element.id];
  await draw(element, figure, dark.matches ? "dark" : "light");
  if (drawn.has(element)) return;
  drawn.add(element);
  if (isTimeline(figure)) pointAt(element);
  if (figure.layout.meta?.choices?.length > 1) offerChoice(element, figure.layout.meta.choices);
  for (const button of element.parentElement.querySelectorAll("button")) {
    const format = button.value, scale = format === "png" ? 2 : 1;
    button.addEventListener("click", () => {
      const { width, height } = element._fullLayout;
      Plotly.downloadImage(element, { format, scale, width, height, filename: element.id });
    });
  }
}

// Of several pictures in one place, one is seen: the reader says which.
function offerChoice(element, names) {
  const choice = document.createElement("select");
  choice.className = "choice";
  choice.setAttribute("aria-label", "what is shown");
  for (const name of names) choice.add(new Option(name));
  choice.addEventListener("change", () => {
    pictures.figures[element.id].data.forEach((trace, index) => { trace.visible = index === choice.selectedIndex; });
    drawOne(element);
  });
  element.before(choice);
}

function pointAt(element) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  element.append(tip);
  const moves = (change) => Object.keys(change).some((key) => key.startsWith("xaxis") || key === "autosize");
  element.on("plotly_relayout", (change) => { if (moves(change)) writeTexts(element); });
  element.on("plotly_restyle", ([change]) => { if ("visible" in change) writeTexts(element); });
  element.addEventListener("mouseleave", () => { tip.hidden = true; });
  element.addEventListener("mousemove", (event) => {
    const { xaxis, yaxis } = element._fullLayout;
    const frame = element.getBoundingClientRect();
    const px = event.clientX - frame.left, py = event.clientY - frame.top;
    const time = xaxis.p2c(px - xaxis._offset), level = yaxis.p2c(py - yaxis._offset);
    const lane = Math.round(-level), lanes = element.layout.yaxis.tickvals.length;
    const beside = px < xaxis._offset || px > xaxis._offset + xaxis._length || time < 0;
    tip.hidden = beside || lane < 0 || lane >= lanes || event.buttons > 0;
    if (tip.hidden) return;
    const box = boxAt(element, lane, time, level + lane), unit = element.layout.meta.unit;
    const digits = (value, count) => +value.toPrecision(count);
    const times = `from ${digits(box.start, 5)} ${unit}, takes ${digits(box.end - box.start, 3)} ${unit}`;
    const rank = element.layout.yaxis.ticktext[lane];
    // As text: names of measured intervals are not ours.
    tip.innerText = [box.name, rank, times, heldAt(element, lane, time)].join("\n").trim();
    const right = px + 16 + tip.offsetWidth > frame.width;
    tip.style.left = `${right ? px - tip.offsetWidth - 12 : px + 16}px`;
    tip.style.top = `${py + 14}px`;
  });
}

async function drawAll() {
  for (const element of document.querySelectorAll(".figure")) await drawOne(element);
  document.documentElement.dataset.drawn = drawn.size;
}

unpackPlotly().then(drawAll).catch((error) => {
  const trouble = document.createElement("p");
  trouble.className = "trouble";
  trouble.textContent = `The pictures could not be drawn; a browser of 2023 or newer is needed. ${error}`;
  document.querySelector("header").append(trouble);
  console.error(error);
});
dark.addEventListener("change", drawAll);
