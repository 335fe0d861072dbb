// What every process did, by time. The wheel zooms down to milliseconds, dragging moves.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { type Lane, type Span, type TimelineAnswer, apiPath, useResource } from "../api";
import { duration, words } from "../format";
import { useKeys } from "../keys";
import { useTick } from "../live";
import { Empty, Loaded, Page, Panel } from "../parts/basic";
import { Canvas, type Point } from "../parts/canvas";
import { clip, drawTimeAxis } from "../parts/time_axis";
import { go, href, setFilters, useRoute } from "../router";
import { colour } from "../theme";
import { visible } from "../text";

const KINDS: Record<string, string> = { policy: "series-1", worker: "series-6", environment: "series-3", trainer: "series-2", publication: "series-4", checkpoint: "series-7", dispatcher: "series-8", action: "series-5" };
const MARKS = 20;
const AXIS = 22;
const DENSITY = 36;
const SHORTEST_S = 1e-3;

interface Place {
  lane: Lane;
  top: number;
  height: number;
  row: number;
}

function gutter(width: number): number {
  return width < 600 ? 84 : 120;
}

export function TimelinePage({ isRunning }: { isRunning: boolean }) {
  const { query } = useRoute();
  const asked: [number, number] | null = query.has("from") && query.has("to") ? [Number(query.get("from")), Number(query.get("to"))] : null;
  const tick = useTick(4000);
  const answer = useResource<TimelineAnswer>(apiPath("timeline", { from: asked?.[0], to: asked?.[1], width: 1500 }), isRunning && !asked ? tick : 0);
  return (
    <Page title="Timeline" about="Scroll over the chart to zoom, drag to move, double-click to see everything.">
      <Loaded from={answer}>
        {(data) =>
          data.lanes.length === 0 ? (
            <Panel>
              <Empty title="No spans were recorded.">A run records them when telemetry.spans is enabled.</Empty>
            </Panel>
          ) : (
            <TimelineChart data={data} asked={asked} />
          )
        }
      </Loaded>
    </Page>
  );
}

function TimelineChart({ data, asked }: { data: TimelineAnswer; asked: [number, number] | null }) {
  const [view, setView] = useState<[number, number]>([data.from, data.to]);
  const [hovered, setHovered] = useState<{ lane: Lane; span: Span } | null>(null);
  const dragged = useRef<[number, number] | null>(null);
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null);
  useEffect(() => setView(asked ?? [data.begin, data.end]), [asked?.[0], asked?.[1], data.begin, data.end]);

  const places = layout(data.lanes);
  const bottom = (places.at(-1)?.top ?? MARKS) + (places.at(-1)?.height ?? 0) + 6;
  const height = bottom + AXIS;
  const [from, to] = view;
  const time = ({ x, width }: Point) => from + ((x - gutter(width)) / (width - gutter(width) - 6)) * (to - from);

  // The picture follows the pointer at once; exact spans of the new window are fetched when it rests.
  const show = (next: [number, number]) => {
    const middle = (next[0] + next[1]) / 2;
    const half = Math.max(SHORTEST_S / 2, (next[1] - next[0]) / 2);
    const window: [number, number] = [Math.max(data.begin - half, middle - half), Math.min(data.end + half, middle + half)];
    setView(window);
    if (timer.current) clearTimeout(timer.current);
    timer.current = setTimeout(() => setFilters({ from: window[0].toFixed(6), to: window[1].toFixed(6) }, { replace: true }), 250);
  };
  const showAll = () => {
    if (timer.current) clearTimeout(timer.current);
    setFilters({ from: null, to: null }, { replace: true });
  };
  const zoom = (factor: number, around = (from + to) / 2) => show([around - (around - from) * factor, around + (to - around) * factor]);
  useKeys({ "+": () => zoom(0.5), "-": () => zoom(2), "0": showAll, ArrowLeft: () => show([from - (to - from) / 4, to - (to - from) / 4]), ArrowRight: () => show([from + (to - from) / 4, to + (to - from) / 4]) });

  const draw = useCallback(
    (pen: CanvasRenderingContext2D, width: number) => {
      const left = gutter(width);
      const right = width - 6;
      const x = (at: number) => left + ((at - from) / (to - from)) * (right - left);
      drawTimeAxis(pen, from, to, left, right, bottom, data.begin);
      pen.save();
      pen.beginPath();
      pen.rect(left, 0, right - left, bottom);
      pen.clip();
      for (const mark of data.marks) {
        if (mark.at < from || mark.at > to || mark.kind === "step") continue;
        pen.fillStyle = colour(mark.kind === "restart" ? "bad" : (KINDS[mark.kind] ?? "muted"));
        const isTall = mark.kind === "restart" || mark.kind === "action";
        pen.fillRect(x(mark.at), 2, isTall ? 2 : 1, isTall ? bottom : MARKS - 8);
      }
      drawSteps(pen, data, x, from, to);
      for (const place of places) drawLane(pen, place, x, from, to);
      pen.restore();
      pen.textAlign = "left";
      for (const { lane, top, height: tall } of places) {
        pen.fillStyle = colour("ink");
        pen.fillText(clip(lane.label, width < 600 ? 12 : 18), 0, top + Math.min(tall, 20) / 2);
      }
    },
    [data, from, to],
  );

  const find = (point: Point | null) => {
    if (!point) return setHovered(null);
    const near = ((to - from) / point.width) * 4;
    const action = point.y < MARKS ? data.marks.find((mark) => mark.kind === "action" && Math.abs(mark.at - time(point)) < near) : undefined;
    if (action) return setHovered({ lane: data.lanes[0]!, span: [action.at, action.at, action.label, 0, {}] });
    const place = places.find((one) => point.y >= one.top && point.y < one.top + one.height);
    if (!place) return setHovered(null);
    const at = time(point);
    const slack = ((to - from) / point.width) * 2;
    const row = Math.floor((point.y - place.top) / place.row);
    const span = place.lane.spans.filter((one) => one[0] - slack <= at && one[1] + slack >= at && one[3] === row).at(-1);
    setHovered(span ? { lane: place.lane, span } : null);
  };
  const group = hovered?.span[4].group_id;
  return (
    <Panel flush>
      <div class="panel-head">
        <span class="muted">
          {duration(to - from)} of {duration(data.end - data.begin)}
          {data.is_complete ? "" : "; a sample of the spans, zoom in to see all"}
        </span>
        <span class="row">
          <button class="button small" onClick={() => zoom(0.5)} aria-label="Zoom in (+)">
            +
          </button>
          <button class="button small" onClick={() => zoom(2)} aria-label="Zoom out (−)">
            −
          </button>
          <button class="button small" onClick={showAll}>
            Everything
          </button>
        </span>
      </div>
      <div class="timeline" onDblClick={showAll}>
        <Canvas
          label={`Timeline of ${duration(to - from)}; lanes: ${data.lanes.map((lane) => lane.label).join(", ")}`}
          height={height}
          draw={draw}
          cursor={typeof group === "string" ? "pointer" : "grab"}
          onHover={find}
          onWheel={(point, amount) => zoom(Math.exp(Math.max(-200, Math.min(200, amount)) * 0.003), time(point))}
          onDrag={(start, now, isDone) => {
            dragged.current ??= view;
            const [low, high] = dragged.current;
            const shift = ((now.x - start.x) / (now.width - gutter(now.width) - 6)) * (high - low);
            show([low - shift, high - shift]);
            if (isDone) dragged.current = null;
          }}
          onClick={() => typeof group === "string" && go(href("rollout", [group, Number(hovered?.span[4].episode ?? 0)]))}
          tip={
            hovered ? (
              <>
                <b>{visible(words(hovered.span[2]))}</b> {hovered.span[1] > hovered.span[0] ? duration(hovered.span[1] - hovered.span[0]) : ""}
                {Object.entries(hovered.span[4]).map(([name, value]) => `\n${words(name)} ${visible(String(value))}`)}
              </>
            ) : null
          }
        />
      </div>
    </Panel>
  );
}

function layout(lanes: Lane[]): Place[] {
  let top = MARKS;
  return lanes.map((lane) => {
    const row = lane.rows > 12 ? 5 : lane.rows > 4 ? 8 : lane.rows > 1 ? 12 : 18;
    const height = lane.density ? DENSITY : Math.max(1, lane.rows) * row;
    const place = { lane, top, height, row };
    top += Math.max(18, height) + 10;
    return place;
  });
}

function drawLane(pen: CanvasRenderingContext2D, { lane, top, height, row }: Place, x: (at: number) => number, from: number, to: number): void {
  const paint = colour(KINDS[lane.kind] ?? "series-8");
  pen.fillStyle = colour("sunken");
  pen.fillRect(x(from), top, x(to) - x(from), height);
  if (lane.density) {
    const { edges, busy } = lane.density;
    const most = Math.max(1, ...busy);
    pen.fillStyle = paint;
    busy.forEach((share, i) => {
      const tall = (share / most) * height;
      pen.fillRect(x(edges[i]!), top + height - tall, Math.max(0.5, x(edges[i + 1]!) - x(edges[i]!) + 0.3), tall);
    });
    return;
  }
  for (const [start, end, name, at] of lane.spans) {
    if (end < from || start > to) continue;
    // Waiting is drawn as an outline of nothing: what a process does should stand out.
    pen.fillStyle = /wait/.test(name) ? colour("line") : paint;
    pen.fillRect(x(start), top + at * row + 0.5, Math.max(1, x(end) - x(start) - (x(end) - x(start) > 4 ? 0.5 : 0)), row - 1);
  }
}

/** Numbers of steps above the lanes, as many as fit. */
function drawSteps(pen: CanvasRenderingContext2D, data: TimelineAnswer, x: (at: number) => number, from: number, to: number): void {
  pen.textAlign = "left";
  let free = -Infinity;
  for (const mark of data.marks) {
    if (mark.kind !== "step" || mark.at < from || mark.at > to) continue;
    const left = x(mark.at);
    if (left < free) continue;
    pen.fillStyle = colour("line");
    pen.fillRect(left, 2, 1, MARKS - 4);
    pen.fillStyle = colour("muted");
    pen.fillText(String(mark.step ?? mark.label), left + 3, 8);
    free = left + 46;
  }
}
