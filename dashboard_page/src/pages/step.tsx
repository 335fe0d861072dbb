// Batch anatomy: one bar per sample of a step, from the moment its group was opened until it was trained.
import { useCallback, useMemo, useState } from "preact/hooks";
import { type Anatomy, type AnatomyGroup, type AnatomySample, apiPath, useResource } from "../api";
import { dateTime, duration, number, percent, plural, words } from "../format";
import { useKeys } from "../keys";
import { Badge, Empty, Loaded, Page, Panel, Segmented, Stat } from "../parts/basic";
import { Canvas, type Point } from "../parts/canvas";
import { clip, drawTimeAxis } from "../parts/time_axis";
import { go, href } from "../router";
import { colour, mix } from "../theme";
import { visible } from "../text";

export const PART_COLOURS: Record<string, string> = { wait: "line", generate: "series-1", act: "series-3", score: "series-4", other: "series-8", queue: "accent-soft" };
const PART_NAMES: Record<string, string> = { wait: "waits", generate: "generates", act: "acts in the environment", score: "is scored", other: "other work", queue: "is queued for training" };
const GUTTER = 150;
const AXIS = 22;

export function StepPage({ step }: { step: number }) {
  const anatomy = useResource<Anatomy>(apiPath(`steps/${step}`));
  const open = (other: number | null | undefined) => other && go(href("steps", [other]));
  useKeys({ j: () => open(anatomy.data?.previous), k: () => open(anatomy.data?.next) });
  return (
    <Loaded from={anatomy}>
      {(data) => (
        <Page
          title={`Step ${data.step}`}
          about={data.decided_at ? `The batch was decided ${dateTime(data.decided_at)}${data.trained_at ? ` and trained ${duration(data.trained_at - data.decided_at)} later` : "; it is not trained yet"}.` : undefined}
          aside={
            <span class="row">
              {data.previous ? (
                <a class="button" href={href("steps", [data.previous])}>
                  ← Step {data.previous}
                </a>
              ) : null}
              {data.next ? (
                <a class="button" href={href("steps", [data.next])}>
                  Step {data.next} →
                </a>
              ) : null}
              <a class="button" href={href("rollouts", [], { step: data.step })}>
                Rollouts of this step
              </a>
            </span>
          }
        >
          <Figures data={data} />
          <Panel title="Batch anatomy" more={`${plural(data.groups.length, "group")}, ${plural(data.groups.reduce((sum, group) => sum + group.samples.length, 0), "sample")}`}>
            {data.groups.length ? <AnatomyChart data={data} /> : <Empty title="The groups of this step are not known." />}
          </Panel>
          <Panel title="All values of the trainer" flush>
            <div class="value-grid">
              {Object.entries(data.metrics).map(([name, value]) => (
                <span key={name}>
                  <span class="muted">{name}</span> <b>{number(value, 4)}</b>
                </span>
              ))}
            </div>
          </Panel>
        </Page>
      )}
    </Loaded>
  );
}

function Figures({ data }: { data: Anatomy }) {
  const value = (name: string) => data.metrics[name] ?? null;
  const versions = [...new Set(data.groups.flatMap((group) => group.samples.flatMap((sample) => sample.versions)))].sort((a, b) => a - b);
  return (
    <div class="stats">
      <Stat label="Reward" value={number(value("rollout/reward"))} />
      <Stat label="Solved" value={percent(value("rollout/accuracy"))} />
      <Stat label="Lag" value={number(value("async/version_offset_max"))} unit={`mean ${number(value("async/version_offset_mean"), 2)}`} note={versions.length ? `sampled by version ${versions.join(", ")}` : undefined} />
      <Stat label="Trainer waited" value={duration(value("perf/sample_wait_time"))} note={`trained for ${duration(value("perf/train_time"))}`} />
      <Stat label="Loss" value={number(value("train/loss"))} note={`gradient norm ${number(value("train/grad_norm"))}`} />
    </div>
  );
}

const UNKNOWN: AnatomySample = { sample: 0, reward: null, solved: null, tokens: null, turns: null, end: null, start: null, finish: null, parts: [], versions: [] };

interface Bar {
  group: AnatomyGroup;
  sample: AnatomySample;
  y: number;
  isFirst: boolean;
}

function AnatomyChart({ data }: { data: Anatomy }) {
  const [shade, setShade] = useState<"part" | "version">("part");
  const [hovered, setHovered] = useState<{ bar: Bar; part: [string, number, number] | null } | null>(null);
  const samples = data.groups.reduce((sum, group) => sum + group.samples.length, 0);
  const size = samples > 160 ? 5 : samples > 64 ? 7 : 11;
  const bars = useMemo(() => {
    const found: Bar[] = [];
    let y = 4;
    for (const group of data.groups) {
      // Older runs recorded no samples: one bar from the opening of the group until it was complete.
      const samples = group.samples.length ? group.samples : [{ ...UNKNOWN, start: group.opened_at, finish: group.queued_at }];
      samples.forEach((sample, at) => {
        found.push({ group, sample, y, isFirst: at === 0 });
        y += size;
      });
      y += 5;
    }
    return found;
  }, [data, size]);
  const height = (bars.at(-1)?.y ?? 0) + size + 6 + AXIS;
  const begin = data.begin ?? Math.min(...data.groups.map((group) => group.opened_at ?? Infinity));
  const end = Math.max(data.end ?? 0, data.trained_at ?? 0, begin + 1e-3);
  const versions = data.groups.flatMap((group) => group.samples.flatMap((sample) => sample.versions));
  const oldest = Math.min(...versions);
  const newest = Math.max(...versions, oldest + 1);

  const draw = useCallback(
    (pen: CanvasRenderingContext2D, width: number, tall: number) => {
      const x = (time: number) => GUTTER + ((time - begin) / (end - begin)) * (width - GUTTER - 8);
      drawTimeAxis(pen, begin, end, GUTTER, width - 8, tall - AXIS);
      for (const { group, sample, y, isFirst } of bars) {
        if (isFirst) {
          pen.fillStyle = colour("muted");
          pen.textAlign = "left";
          pen.fillText(clip(visible(group.group_id), 22), 0, y + 5);
        }
        const opened = group.opened_at ?? begin;
        pen.fillStyle = colour("grid");
        pen.fillRect(x(opened), y, Math.max(1, x(group.trained_at ?? group.batched_at ?? end) - x(opened)), size - 1);
        const version = sample.versions[0];
        for (const [name, from, to] of sample.parts) {
          pen.fillStyle = shade === "part" ? colour(PART_COLOURS[name] ?? "series-8") : name === "generate" && version !== undefined ? mix(colour("heat-0"), colour("heat-1"), 0.25 + (0.75 * (version - oldest)) / (newest - oldest)) : colour("line");
          pen.fillRect(x(from), y, Math.max(1, x(to) - x(from)), size - 1);
        }
        if (sample.parts.length === 0 && sample.start !== null && sample.finish !== null) {
          pen.fillStyle = colour("series-1");
          pen.fillRect(x(sample.start), y, Math.max(1, x(sample.finish) - x(sample.start)), size - 1);
        }
      }
      for (const [time, label] of [[data.decided_at, "decided"], [data.trained_at, "trained"]] as const) {
        if (time === null) continue;
        pen.strokeStyle = colour("ink");
        pen.setLineDash([3, 3]);
        pen.beginPath();
        pen.moveTo(x(time), 0);
        pen.lineTo(x(time), tall - AXIS);
        pen.stroke();
        pen.setLineDash([]);
        pen.fillStyle = colour("ink");
        pen.textAlign = "right";
        pen.fillText(label, x(time) - 4, label === "decided" ? 8 : 22);
      }
    },
    [data, bars, shade],
  );
  const find = (point: Point | null) => {
    const bar = point && bars.find((one) => point.y >= one.y && point.y < one.y + size);
    if (!bar || !point) return setHovered(null);
    const time = begin + ((point.x - GUTTER) / (point.width - GUTTER - 8)) * (end - begin);
    setHovered({ bar, part: bar.sample.parts.find(([, from, to]) => time >= from && time <= to) ?? null });
  };
  return (
    <div class="stack">
      <div class="row between">
        <Segmented label="Shade by" value={shade} options={[["part", "What it does"], ["version", "Policy version"]]} onChange={setShade} />
        <ul class="legend">
          {shade === "part"
            ? Object.entries(PART_NAMES).map(([name, label]) => (
                <li key={name}>
                  <i class="box" style={{ background: `var(--${PART_COLOURS[name]})` }} /> {label}
                </li>
              ))
            : [oldest, newest].filter(Number.isFinite).map((version, at) => (
                <li key={version}>
                  <i class="box" style={{ background: "var(--heat-1)", opacity: at ? "1" : "0.3" }} /> version {version}
                </li>
              ))}
        </ul>
      </div>
      <Canvas
          label={`Batch anatomy of step ${data.step}: ${samples} samples over ${duration(end - begin)}`}
          height={height}
          draw={draw}
          onHover={find}
          onClick={() => hovered && go(href("rollout", [hovered.bar.group.group_id, hovered.bar.sample.sample], { step: data.step }))}
          cursor={hovered ? "pointer" : "default"}
          tip={
            hovered ? (
              <>
                <b class="mono">{visible(hovered.bar.group.group_id)}</b> sample {hovered.bar.sample.sample}
                {"\n"}
                {hovered.part ? `${PART_NAMES[hovered.part[0]] ?? hovered.part[0]} for ${duration(hovered.part[2] - hovered.part[1])}\n` : ""}
                reward {number(hovered.bar.sample.reward)}, {number(hovered.bar.sample.tokens)} tokens, {number(hovered.bar.sample.turns)} turns, {words(hovered.bar.sample.end ?? "")}
                {"\n"}lag {number(hovered.bar.group.lag)}, version {hovered.bar.sample.versions.join(", ") || "–"} {hovered.bar.group.unusable ? <Badge tone="warn">unusable: {hovered.bar.group.unusable}</Badge> : null}
              </>
            ) : null
          }
        />
    </div>
  );
}
