// Formats numbers for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

/** Seconds: `24 ms`, `1.52 s`, `75 s`. */
export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value < 10 ? value.toFixed(2) : value < 60 ? value.toFixed(1) : whole.format(value)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const rate = (value) => (value > 0 && value < 10 ? value.toFixed(1) : whole.format(value));

export const percent = (part) => (part > 0 && part < 0.001 ? "<0.1 %" : `${(part * 100).toFixed(part < 0.1 ? 1 : 0)} %`);

/** `1 token`, `12 tokens`. */
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
