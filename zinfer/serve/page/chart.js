// Two lines over the last values.
const MOST = 300;
const [WIDTH, HEIGHT] = [600, 120];

export class Chart {
  constructor(...paths) {
    this.paths = paths;
    this.values = paths.map(() => []);
  }

  // Adds a value to each line, and returns the greatest one shown.
  add(...values) {
    values.forEach((value, index) => {
      this.values[index].push(value);
      if (this.values[index].length > MOST) this.values[index].shift();
    });
    const peak = Math.max(...this.values.flat());
    this.paths.forEach((path, index) => path.setAttribute("d", line(this.values[index], peak)));
    return peak;
  }
}

function line(values, peak) {
  const begin = WIDTH - ((values.length - 1) * WIDTH) / (MOST - 1);
  const points = values.map((value, index) => {
    const [x, y] = [begin + (index * WIDTH) / (MOST - 1), HEIGHT - (peak ? (value / peak) * (HEIGHT - 4) : 0) - 1];
    return `${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  return `M${points.join(" L")}`;
}
