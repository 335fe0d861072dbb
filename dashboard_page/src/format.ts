// How values are shown. A missing value is always a dash.
export const NONE = "–";

type Maybe = number | null | undefined;

export function number(value: Maybe, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value)) return count(value);
  if (size >= 10_000) return count(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  const decimals = size >= 100 ? 1 : size >= 10 ? 2 : digits;
  return value.toFixed(decimals).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Fixed decimals, for columns of a table. */
export function fixed(value: Maybe, decimals: number): string {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : value.toFixed(decimals);
}

/** Exact up to ten million, so that the terms of the conservation law visibly add up. */
export function count(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}B`;
  if (size >= 1e7) return `${trim(value / 1e6)}M`;
  return Math.round(value).toLocaleString("en");
}

export function percent(value: Maybe, decimals = 0): string {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : `${(value * 100).toFixed(decimals)}%`;
}

export function duration(seconds: Maybe): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return whole % 60 ? `${Math.floor(whole / 60)} min ${pad(whole % 60)} s` : `${whole / 60} min`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${pad(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

export function bytes(value: Maybe): string {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at === 0 ? value : trim(value)} ${units[at]}`;
}

export function clock(time: Maybe): string {
  return time ? new Date(time * 1000).toLocaleTimeString("en-GB") : NONE;
}

export function dateTime(time: Maybe): string {
  return time ? new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : NONE;
}

export function plural(value: number, noun: string, many = `${noun}s`): string {
  return `${count(value)} ${value === 1 ? noun : many}`;
}

/** `max_turns` → `max turns`. */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}

function trim(value: number): string {
  return value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

function pad(value: number): string {
  return String(value).padStart(2, "0");
}
