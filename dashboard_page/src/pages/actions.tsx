// What operators did to the run, and, for operators, doing it.
import { useEffect, useState } from "preact/hooks";
import { type ActionRow, type Actions, type Runs, apiPath, useResource } from "../api";
import { dateTime, plural } from "../format";
import { useTick } from "../live";
import { AuthorInput, Confirm, OperatorLogin, type Wanted, useAuthor, useOperator } from "../parts/act";
import { Badge, Empty, Loaded, Notice, Page, Panel, type Tone } from "../parts/basic";
import { href, setFilters, useRoute } from "../router";
import { visible } from "../text";

const GATES: Record<string, [text: string, tone: Tone]> = { open: ["groups are admitted", "good"], full: ["groups are admitted as places become free", "good"], no_policy: ["waits for the first weights", "info"], paused: ["admission paused", "warn"], draining: ["draining", "warn"], ended: ["the run is over", "info"] };
const PAUSE: Wanted = { kind: "pause", title: "Pause admission", effect: "No group starts until admission is resumed. Groups that are being played finish, and full batches are trained." };
const RESUME: Wanted = { kind: "resume", title: "Resume admission", effect: "Groups start again. A pause or a drain ends." };
const DRAIN: Wanted = { kind: "drain", title: "Drain the run", effect: "No new draw starts. When what was started is trained, the run stops with a checkpoint. The command that started it continues it.", isDangerous: true };
const CHECKPOINT: Wanted = { kind: "checkpoint", title: "Write a checkpoint", effect: "The trainer writes one after its current step, or at once if it waits for groups." };

function quarantine(task: string): Wanted {
  return { kind: "quarantine", title: `Quarantine ${task}`, target: task, effect: "Its open groups are dropped, and so are its later draws, until it is readmitted. Batches that were decided stay as they are.", isDangerous: true };
}

function readmit(task: string): Wanted {
  return { kind: "readmit", title: `Readmit ${task}`, target: task, effect: "Later draws of the task are played again." };
}

export function ActionsPage({ runs }: { runs: Runs }) {
  const operator = useOperator(runs);
  const actions = useResource<Actions>(apiPath("actions"), useTick(3000));
  return (
    <Page title="Actions" about="Each action is recorded in the ledger with its author and time.">
      <Loaded from={actions}>
        {(data) => (
          <>
            <Panel title="Now">
              <div class="row">
                <Badge tone={GATES[data.gate ?? ""]?.[1] ?? ""}>{GATES[data.gate ?? ""]?.[0] ?? "unknown"}</Badge>
                {data.checkpoint_requested === null ? null : <Badge tone="info">a checkpoint of step {data.checkpoint_requested} or later is requested</Badge>}
                <span class="muted">{data.quarantined.length ? `${plural(data.quarantined.length, "task")} in quarantine` : "no task in quarantine"}</span>
              </div>
            </Panel>
            {!operator.isAllowed ? (
              <Notice tone="info">
                This dashboard only shows runs. Start it with <code>--allow-actions</code> to act on them, or use <code>rollbook act RUN</code>.
              </Notice>
            ) : data.gate === "ended" ? (
              <Notice tone="info">The run is over. Notes about its rollouts can still be added, on the page of a rollout.</Notice>
            ) : operator.isOperator ? (
              <Act data={data} onDone={actions.reload} />
            ) : (
              <Panel title="Act on the run">
                <OperatorLogin onDone={operator.reload} />
              </Panel>
            )}
            <Panel title="Who did what" more={data.count ? plural(data.count, "action") : undefined} flush>
              {data.actions.length ? <History rows={data.actions} /> : <Empty title="No operator has acted on this run." />}
            </Panel>
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Act({ data, onDone }: { data: Actions; onDone: () => void }) {
  const { query } = useRoute();
  const proposed = query.get("quarantine");
  const [author, setAuthor] = useAuthor();
  const [task, setTask] = useState(proposed ?? "");
  const [wanted, setWanted] = useState<Wanted | null>(proposed ? quarantine(proposed) : null);
  useEffect(() => void (proposed && setFilters({ quarantine: null }, { replace: true })), []);
  const close = (isDone: boolean) => {
    setWanted(null);
    if (isDone) {
      setTask("");
      onDone();
    }
  };
  return (
    <Panel title="Act on the run">
      <div class="stack">
        <AuthorInput author={author} onChange={setAuthor} />
        <div class="row">
          {data.paused || data.draining ? (
            <button class="button" onClick={() => setWanted(RESUME)}>
              Resume admission
            </button>
          ) : (
            <button class="button" onClick={() => setWanted(PAUSE)}>
              Pause admission
            </button>
          )}
          <button class="button" onClick={() => setWanted(CHECKPOINT)}>
            Write a checkpoint
          </button>
          <button class="button danger" disabled={data.draining} onClick={() => setWanted(DRAIN)}>
            Drain the run
          </button>
        </div>
        <form
          class="row"
          onSubmit={(event) => {
            event.preventDefault();
            if (task.trim()) setWanted(quarantine(task.trim()));
          }}
        >
          <input type="text" aria-label="Task" placeholder="Task id" value={task} onInput={(event) => setTask((event.target as HTMLInputElement).value)} />
          <button class="button danger" disabled={!task.trim()}>
            Quarantine the task
          </button>
        </form>
        {data.quarantined.length ? (
          <div class="row">
            {data.quarantined.map((one) => (
              <span class="chip" key={one}>
                <span class="mono">{visible(one)}</span>
                <button aria-label={`Readmit ${one}`} title="Readmit" onClick={() => setWanted(readmit(one))}>
                  ×
                </button>
              </span>
            ))}
          </div>
        ) : null}
        {wanted ? <Confirm key={`${wanted.kind} ${wanted.target ?? ""}`} wanted={wanted} author={author} onClose={close} /> : null}
      </div>
    </Panel>
  );
}

function History({ rows }: { rows: ActionRow[] }) {
  return (
    <div class="table-box" tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th>Time</th>
            <th>Who</th>
            <th>What</th>
            <th>About</th>
            <th>Note</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.number}>
              <td class="nowrap muted">{dateTime(row.at)}</td>
              <td>{visible(row.author)}</td>
              <td>
                <b>{row.kind}</b>
              </td>
              <td class="mono nowrap">
                {row.target ? (
                  <a href={row.kind === "annotate" ? href("rollout", [row.target, row.sample ?? 0]) : href("rollouts", [], { task: row.target })}>{visible(row.target)}</a>
                ) : (
                  ""
                )}
              </td>
              <td>{visible(row.note)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
