// Axes of canvases that show time.
import { colour } from "../theme";

export function clip(text: string, length: number): string {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

/** Seconds since `begin`, at round values. */
export function drawTimeAxis(pen: CanvasRenderingContext2D, begin: number, end: number, left: number, right: number, bottom: number, origin = begin): void {
  const span = end - begin;
  const rough = span / Math.max(2, (right - left) / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? rough;
  pen.textAlign = "center";
  for (let at = Math.ceil((begin - origin) / step) * step; at <= end - origin + step * 1e-6; at += step) {
    const x = left + ((at + origin - begin) / span) * (right - left);
    pen.fillStyle = colour("grid");
    pen.fillRect(x, 0, 1, bottom);
    pen.fillStyle = colour("muted");
    pen.fillText(axisTime(at, step), Math.min(right - 16, Math.max(left + 8, x)), bottom + 11);
  }
}

function axisTime(seconds: number, step: number): string {
  if (step < 1) return `${seconds.toFixed(Math.min(6, Math.ceil(-Math.log10(step))))} s`;
  if (Math.abs(seconds) < 120) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const rest = `${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}:${String(whole % 60).padStart(2, "0")}`;
  return whole >= 3600 ? `${Math.floor(whole / 3600)}:${rest}` : rest;
}
