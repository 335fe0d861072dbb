// A line chart over steps, seconds or tokens. Charts with the same `sync` share their cursor.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { number } from "../format";
import { colour, seriesColour, useScheme } from "../theme";

export interface Series {
  label: string;
  values: (number | null)[];
  /** Index into the palette; by default its position in the chart. */
  tone?: number;
  dash?: boolean;
  /** Points instead of a line: evaluations, which are sparse. */
  points?: boolean;
  steps?: boolean;
  width?: number;
  fill?: boolean;
}

export interface ChartProps {
  title: string;
  x: number[];
  series: Series[];
  xLabel?: string;
  height?: number;
  format?: (value: number | null | undefined) => string;
  xFormat?: (value: number | null | undefined) => string;
  range?: [number | null, number | null];
  /** A horizontal line with a label: a bound. */
  bound?: { value: number; label: string };
  /** Lower and upper values around the series of this index. */
  band?: { of: number; low: (number | null)[]; high: (number | null)[] };
  sync?: string;
  /** Called with the x value of a click. */
  onPick?: (x: number) => void;
}

export function Chart(props: ChartProps) {
  const { title, series, format = number, xFormat = number, xLabel = "step" } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const values = useRef<(HTMLElement | null)[]>([]);
  const position = useRef<HTMLElement>(null);
  const latest = useRef(props);
  latest.current = props;
  const scheme = useScheme();
  const shape = JSON.stringify([
    series.map((one) => [one.label, one.tone, one.dash, one.points, one.steps, one.fill]),
    props.height,
    props.bound,
    props.sync,
    Boolean(props.band),
    xLabel,
  ]);

  const showValues = (at: number | null) => {
    const { x, series: lines, format: write = number, xFormat: writeX = number, xLabel: name = "step" } = latest.current;
    lines.forEach((line, i) => {
      const element = values.current[i];
      if (element) element.textContent = write(at === null ? last(line.values) : (line.values[at] ?? null));
    });
    if (position.current) position.current.textContent = at === null ? "" : `${name} ${writeX(x[at])}`;
  };

  useEffect(() => {
    const element = box.current!;
    const chart = new uPlot(options(latest.current, element.clientWidth, showValues), data(latest.current), element);
    plot.current = chart;
    showValues(null);
    const observer = new ResizeObserver(() => {
      if (element.clientWidth > 0) chart.setSize({ width: element.clientWidth, height: latest.current.height ?? 180 });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape, scheme]);

  useEffect(() => {
    const chart = plot.current;
    if (!chart) return;
    const isZoomed = chart.data[0].length > 0 && zoomed(chart);
    chart.setData(data(props), !isZoomed);
    if (chart.cursor.idx === null || chart.cursor.idx === undefined) showValues(null);
  }, [props.x, props.series]);

  const summary = series.map((one) => `${one.label} ${format(last(one.values))}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        <h3>{title}</h3>
        <span class="chart-at" ref={position} />
        <ul class="legend">
          {series.map((one, i) => (
            <li key={one.label}>
              <i style={{ background: `var(--series-${((one.tone ?? i) % 8) + 1})` }} class={one.dash ? "dashed" : one.points ? "dotted" : ""} />
              {one.label} <b ref={(element) => void (values.current[i] = element)} />
            </li>
          ))}
        </ul>
      </figcaption>
      <div ref={box} class="plot" role="img" aria-label={`${title}, last values: ${summary || "none"}; ${props.x.length} points by ${xLabel} up to ${xFormat(props.x.at(-1))}`} />
      {props.x.length === 0 ? <p class="chart-empty">No values yet.</p> : null}
    </figure>
  );
}

function last(values: (number | null)[]): number | null {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return values[at]!;
  return null;
}

function data(props: ChartProps): uPlot.AlignedData {
  const band = props.band ? [props.band.low, props.band.high] : [];
  return [props.x, ...props.series.map((one) => one.values), ...band] as uPlot.AlignedData;
}

function zoomed(chart: uPlot): boolean {
  const x = chart.data[0];
  const { min, max } = chart.scales.x!;
  return min !== x[0] || max !== x[x.length - 1];
}

/** Distances of ticks on an axis of steps: there is no step 1.5. */
const WHOLE = [1, 2, 5].flatMap((factor) => Array.from({ length: 9 }, (_, power) => factor * 10 ** power)).sort((a, b) => a - b);

function options(props: ChartProps, width: number, onCursor: (at: number | null) => void): uPlot.Options {
  const { series, xLabel = "step", height = 180, format = number, xFormat = number, bound, band, range } = props;
  const axis = { stroke: colour("muted"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("grid"), width: 1 } };
  const tone = (one: Series, i: number) => seriesColour(one.tone ?? i);
  const drawn: uPlot.Series[] = series.map((one, i) => ({
    label: one.label,
    stroke: tone(one, i),
    width: one.points ? 1.25 : (one.width ?? 1.75),
    dash: one.dash ? [5, 4] : undefined,
    spanGaps: true,
    fill: one.fill ? `${tone(one, i)}22` : undefined,
    paths: one.steps ? uPlot.paths.stepped!({ align: 1 }) : undefined,
    points: one.points ? { show: true, size: 6, fill: colour("panel"), stroke: tone(one, i), width: 1.5 } : { show: props.x.length === 1, size: 5 },
  }));
  const at = band ? tone(series[band.of]!, band.of) : "";
  if (band) for (const label of ["low", "high"]) drawn.push({ label, stroke: "transparent", points: { show: false }, spanGaps: true });
  return {
    width,
    height,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: {
      sync: props.sync ? { key: props.sync, setSeries: false } : undefined,
      drag: { x: true, y: false, setScale: true },
      points: { size: 6 },
      bind: {
        click: (chart) => () => {
          const at = chart.cursor.idx;
          const x = at === null || at === undefined ? undefined : chart.data[0][at];
          if (x !== undefined && chart.select.width < 3) props.onPick?.(x);
          return null;
        },
      },
    },
    scales: {
      x: { time: false },
      y: {
        range: (_, low, high) => {
          if (low === null || high === null || !Number.isFinite(low)) return [0, 1];
          const bounded = [Math.min(low, bound?.value ?? low), Math.max(high, bound?.value ?? high)] as const;
          const pad = (bounded[1] - bounded[0] || Math.abs(bounded[1]) || 1) * 0.08;
          return [range?.[0] ?? bounded[0] - pad, range?.[1] ?? bounded[1] + pad];
        },
      },
    },
    axes: [
      { ...axis, size: 24, space: 60, incrs: xLabel === "step" ? WHOLE : undefined, values: (_, splits) => splits.map((value) => (value === null ? "" : xFormat(value))) },
      { ...axis, size: (_, labels) => Math.max(34, 10 + 6.2 * Math.max(0, ...(labels ?? []).map((one) => one.length))), space: 32, values: (_, splits) => splits.map((value) => format(value)) },
    ],
    series: [{}, ...drawn],
    bands: band ? [{ series: [series.length + 2, series.length + 1], fill: `${at}33` }] : undefined,
    hooks: {
      setCursor: [(chart) => onCursor(chart.cursor.idx ?? null)],
      draw: bound ? [(chart) => drawBound(chart, bound)] : [],
    },
  };
}

function drawBound(chart: uPlot, bound: { value: number; label: string }): void {
  const pen = chart.ctx;
  const y = chart.valToPos(bound.value, "y", true);
  const { left, width } = chart.bbox;
  pen.save();
  pen.strokeStyle = colour("bad");
  pen.fillStyle = colour("bad");
  pen.lineWidth = devicePixelRatio;
  pen.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  pen.beginPath();
  pen.moveTo(left, y);
  pen.lineTo(left + width, y);
  pen.stroke();
  pen.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  pen.textAlign = "right";
  pen.textBaseline = "bottom";
  pen.fillText(bound.label, left + width - 4, y - 2);
  pen.restore();
}
