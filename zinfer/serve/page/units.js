// Numbers as people read them.

export function short(value) {
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(2);
}

export function seconds(value) {
  if (value < 0.9995) return `${(1000 * value).toPrecision(3)} ms`;
  return value < 100 ? `${value.toPrecision(3)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  for (; value >= 1000 && index < units.length - 1; index += 1) value /= 1000;
  return `${index && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[index]}`;
}
