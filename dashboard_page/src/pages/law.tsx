// Where every group is: opened = dispatched + queued + batched + trained + durable + dropped.
import { useState } from "preact/hooks";
import { type Audit, type Law, apiPath, post, useResource } from "../api";
import { count, dateTime, duration, number, percent, plural, words } from "../format";
import { useTick } from "../live";
import { Badge, Loaded, Notice, Page, Panel } from "../parts/basic";
import { STATE_COLOURS, STATES } from "../parts/state_bar";
import { linkTo } from "../router";

const MEANINGS: Record<string, string> = {
  dispatched: "being played",
  queued: "complete, waiting for a batch",
  batched: "in a decided batch",
  trained: "trained, not in a checkpoint yet",
  durable: "trained and in a checkpoint",
};
const ROW = 54;

export function LawPage() {
  const law = useResource<Law>(apiPath("law"), useTick(2000));
  return (
    <Page title="Conservation law" about="Every group that was opened is in exactly one state. Each box opens its groups.">
      <Loaded from={law}>
        {(data) => (
          <>
            <Panel>
              <p class="equation">
                <b>{count(data.opened)}</b> opened
                {STATES.map((state, at) => (
                  <span key={state}>
                    <span class="muted"> {at === 0 ? "=" : "+"} </span>
                    <b>{count(total(data, state))}</b> {state}
                  </span>
                ))}{" "}
                <Badge tone={data.holds ? "good" : "bad"}>{data.holds ? "holds" : "violated"}</Badge>
              </p>
            </Panel>
            <Panel title="Flow of groups" more={(data.origins ?? []).map((one) => `${count(one.count)} ${words(one.origin)}`).join(", ")}>
              <Flow law={data} />
            </Panel>
            <AuditPanel last={data.audit} onDone={law.reload} />
          </>
        )}
      </Loaded>
    </Page>
  );
}

function total(law: Law, state: string): number {
  if (state === "dropped") return law.drops.reduce((sum, drop) => sum + drop.count, 0);
  return law.states.find((one) => one.state === state)?.count ?? 0;
}

interface Box {
  name: string;
  count: number;
  meaning: string;
  filter: string;
  colour: string;
}

function Flow({ law }: { law: Law }) {
  const boxes: Box[] = [
    ...law.states.filter((one) => one.state !== "dropped").map((one) => ({ name: one.state, count: one.count, meaning: MEANINGS[one.state] ?? "", filter: one.filter, colour: STATE_COLOURS[one.state] ?? "series-8" })),
    ...law.drops.map((drop) => ({ name: `dropped: ${words(drop.kind)}`, count: drop.count, meaning: drop.meaning, filter: drop.filter, colour: STATE_COLOURS.dropped! })),
  ];
  const height = boxes.length * ROW;
  const all = Math.max(1, law.opened);
  // Bands leave the left box in order; their widths are shares of it. Small ones stay visible.
  let top = 8;
  const bands = boxes.map((box, at) => {
    const thick = box.count === 0 ? 0 : Math.max(1.5, (box.count / all) * (height - 16));
    const end = Math.min(ROW - 14, thick);
    const middle = at * ROW + ROW / 2 - 4;
    const path = `M0,${top} C50,${top} 50,${middle - end / 2} 100,${middle - end / 2} L100,${middle + end / 2} C50,${middle + end / 2} 50,${top + thick} 0,${top + thick} Z`;
    top += thick;
    return { box, path };
  });
  return (
    <div class="flow" style={{ minHeight: `${height}px` }}>
      <div class="flow-source">
        <b>{count(law.opened)}</b>
        <span>opened</span>
      </div>
      <svg viewBox={`0 0 100 ${height}`} preserveAspectRatio="none" style={{ height: `${height}px` }} aria-hidden="true">
        {bands.map(({ box, path }) => (box.count ? <path key={box.name} d={path} fill={`var(--${box.colour})`} opacity="0.45" /> : null))}
      </svg>
      <ul>
        {boxes.map((box) => (
          <li key={box.name} style={{ height: `${ROW}px` }}>
            <a href={linkTo(`/rollouts?${box.filter}`)} style={{ borderLeftColor: `var(--${box.colour})` }}>
              <span>
                <b>{box.name}</b>
                <small>{box.meaning}</small>
              </span>
              <span class="right">
                <b>{count(box.count)}</b>
                <small>{percent(box.count / all, 1)}</small>
              </span>
            </a>
          </li>
        ))}
      </ul>
    </div>
  );
}

function AuditPanel({ last, onDone }: { last: Audit | null; onDone: () => void }) {
  const [isRunning, setRunning] = useState(false);
  const [result, setResult] = useState<Audit | null>(null);
  const [error, setError] = useState<string | null>(null);
  const shown = result ?? last;
  const start = async () => {
    setRunning(true);
    setError(null);
    try {
      setResult(await post<Audit>(apiPath("audit"), {}));
      onDone();
    } catch (failure) {
      setError((failure as Error).message);
    } finally {
      setRunning(false);
    }
  };
  const violations = Array.isArray(shown?.violations) ? shown.violations : [];
  return (
    <Panel title="Audit" more="reads rows, counters and the history of moves, and compares them">
      <div class="stack">
        <div class="row">
          <button class="button primary" disabled={isRunning} onClick={() => void start()}>
            {isRunning ? "Auditing…" : "Audit now"}
          </button>
          {shown ? (
            <span>
              <Badge tone={shown.ok ? "good" : "bad"}>{shown.ok ? "passed" : "failed"}</Badge> {dateTime(shown.at)}
              {shown.steps === undefined ? "" : `: ${plural(shown.opened ?? 0, "group")}, ${plural(shown.steps, "step")}, largest lag ${number(shown.max_lag)}, in ${duration(shown.seconds)}`}
            </span>
          ) : (
            <span class="muted">This run was not audited yet.</span>
          )}
        </div>
        {error ? <Notice tone="bad">{error}</Notice> : null}
        {violations.map((text) => (
          <Notice key={text} tone="bad">
            {text}
          </Notice>
        ))}
      </div>
    </Panel>
  );
}
