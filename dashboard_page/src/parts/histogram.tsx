// A histogram. Dragging over it selects a range.
import { useCallback, useState } from "preact/hooks";
import { count, number } from "../format";
import { colour } from "../theme";
import { Canvas, type Point } from "./canvas";

export interface HistogramProps {
  label: string;
  edges: number[];
  /** Within the filter, and without it. */
  counts: number[];
  all: number[];
  selected: [number | null, number | null] | null;
  onSelect: (range: [number, number] | null) => void;
  height?: number;
}

const FOOT = 16;

export function Histogram({ label, edges, counts, all, selected, onSelect, height = 96 }: HistogramProps) {
  const [brush, setBrush] = useState<[number, number] | null>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  const low = edges[0] ?? 0;
  const high = edges.at(-1) ?? 1;
  const bin = ({ x, width }: Point) => Math.min(counts.length - 1, Math.max(0, Math.floor((x / width) * counts.length)));
  // Whole bins: a bin that is half selected would show a count that the list does not have.
  const snap = (a: Point, b: Point): [number, number] => [edges[Math.min(bin(a), bin(b))]!, edges[Math.max(bin(a), bin(b)) + 1]!];
  const range: [number, number] | null = brush ?? (selected ? [selected[0] ?? low, selected[1] ?? high] : null);

  const draw = useCallback(
    (pen: CanvasRenderingContext2D, w: number, h: number) => {
      const most = Math.max(1, ...all, ...counts);
      const tall = h - FOOT;
      const step = w / Math.max(1, counts.length);
      const x = (value: number) => ((value - low) / (high - low || 1)) * w;
      if (range) {
        pen.fillStyle = colour("accent-soft");
        pen.fillRect(x(range[0]), 0, Math.max(2, x(range[1]) - x(range[0])), tall);
      }
      const bar = (values: number[], paint: string) => {
        pen.fillStyle = paint;
        values.forEach((value, i) => {
          // A root scale: bins with few groups stay visible next to large ones.
          const size = value ? Math.max(2, Math.sqrt(value / most) * (tall - 4)) : 0;
          pen.fillRect(i * step + 0.5, tall - size, Math.max(1, step - 1), size);
        });
      };
      bar(all, colour("line"));
      bar(counts, colour("series-1"));
      pen.strokeStyle = colour("line");
      pen.strokeRect(0, tall + 0.5, w, 0);
      pen.fillStyle = colour("muted");
      pen.textAlign = "left";
      pen.fillText(number(low), 0, h - 6);
      pen.textAlign = "center";
      pen.fillText(number((low + high) / 2), w / 2, h - 6);
      pen.textAlign = "right";
      pen.fillText(number(high), w, h - 6);
    },
    [edges, counts, all, range?.[0], range?.[1]],
  );
  return (
    <Canvas
      label={`${label}: ${counts.map((n, i) => `${number(edges[i])} to ${number(edges[i + 1])}: ${n}`).filter((_, i) => counts[i]).slice(0, 12).join("; ") || "no groups"}`}
      height={height}
      draw={draw}
      onHover={(point: Point | null) => setHovered(point ? bin(point) : null)}
      onDrag={(from, to, isDone) => {
        setBrush(isDone ? null : snap(from, to));
        if (isDone) onSelect(snap(from, to));
      }}
      onClick={(point) => onSelect(selected ? null : snap(point, point))}
      tip={hovered === null || brush ? null : `${number(edges[hovered])} to ${number(edges[hovered + 1])}\n${count(counts[hovered])} of ${count(all[hovered])} groups`}
    />
  );
}
