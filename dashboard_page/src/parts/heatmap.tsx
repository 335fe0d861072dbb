// A heat map of step × lag.
import { useCallback, useState } from "preact/hooks";
import { count, plural } from "../format";
import { colour, mix } from "../theme";
import { Canvas, type Point } from "./canvas";

export interface HeatProps {
  steps: number[];
  stepSize: number;
  lags: number[];
  /** Groups by bucket of steps, then by lag. */
  counts: number[][];
  bound: number | null;
  onPick: (step: number, lag: number) => void;
}

const GUTTER = 52;
const AXIS = 20;

/** The next of 1, 2, 5, 10, 20, 50 … */
function roundUp(value: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= value) ?? 10 * power;
}

export function HeatMap({ steps, stepSize, lags, counts, bound, onPick }: HeatProps) {
  const [hovered, setHovered] = useState<{ bucket: number; row: number } | null>(null);
  const row = Math.max(16, Math.min(34, 180 / Math.max(1, lags.length)));
  const height = lags.length * row + AXIS;
  const most = Math.max(1, ...counts.flat());
  const draw = useCallback(
    (pen: CanvasRenderingContext2D, width: number) => {
      const cell = (width - GUTTER) / Math.max(1, steps.length);
      lags.forEach((lag, at) => {
        const y = (lags.length - 1 - at) * row;
        pen.fillStyle = bound !== null && lag > bound ? colour("bad") : colour("muted");
        pen.textAlign = "right";
        pen.fillText(`lag ${lag}`, GUTTER - 8, y + row / 2);
        steps.forEach((_, bucket) => {
          const n = counts[bucket]?.[at] ?? 0;
          pen.fillStyle = n === 0 ? colour("heat-0") : mix(colour("heat-0"), colour("heat-1"), 0.15 + 0.85 * (n / most));
          pen.fillRect(GUTTER + bucket * cell, y, Math.max(0.6, cell > 6 ? cell - 1 : cell), row - 1);
        });
      });
      if (bound !== null && lags.includes(bound)) {
        const y = (lags.length - 1 - lags.indexOf(bound)) * row;
        pen.fillStyle = colour("bad");
        pen.fillRect(GUTTER, y - 1, width - GUTTER, 1.5);
      }
      pen.fillStyle = colour("muted");
      pen.textAlign = "center";
      const every = roundUp((60 / cell) * stepSize);
      steps.forEach((step, bucket) => {
        if (bucket === 0 || Math.floor(step / every) > Math.floor(steps[bucket - 1]! / every)) {
          const half = pen.measureText(String(step)).width / 2;
          pen.fillText(String(step), Math.min(GUTTER + (bucket + 0.5) * cell, width - half), height - 8);
        }
      });
    },
    [steps, lags, counts, bound, height],
  );
  const find = (point: Point | null) => {
    if (!point || point.x < GUTTER || point.y >= lags.length * row) return null;
    const bucket = Math.floor(((point.x - GUTTER) / (point.width - GUTTER)) * steps.length);
    return { bucket: Math.min(steps.length - 1, bucket), row: lags.length - 1 - Math.floor(point.y / row) };
  };
  const range = (bucket: number) => (stepSize > 1 ? `steps ${steps[bucket]} to ${steps[bucket]! + stepSize - 1}` : `step ${steps[bucket]}`);
  return (
    <Canvas
      label={`Groups by step and lag: ${lags.map((lag, at) => `lag ${lag}: ${plural(counts.reduce((sum, bucket) => sum + (bucket[at] ?? 0), 0), "group")}`).join(", ")}`}
      height={height}
      draw={draw}
      onHover={(point) => setHovered(find(point))}
      onClick={(point) => {
        const place = find(point);
        if (place) onPick(steps[place.bucket]!, lags[place.row]!);
      }}
      cursor="pointer"
      tip={hovered ? `${range(hovered.bucket)}, lag ${lags[hovered.row]}\n${count(counts[hovered.bucket]?.[hovered.row] ?? 0)} groups` : null}
    />
  );
}
