// Is it learning, how far is it, who waits for whom, is it fresh, is it complete, and what is wrong: on one screen.
import { type Column, align } from "../align";
import { type Evaluation, type Metric, type Overview, type Points, type Problem, type SeriesAnswer, type Trend, apiPath, useResource } from "../api";
import { clock, count, dateTime, duration, number, percent, plural } from "../format";
import { useTick } from "../live";
import { Badge, Empty, Facts, Meter, Page, Panel, Spark, Stat, type Tone } from "../parts/basic";
import { Chart } from "../parts/chart";
import { StateBar } from "../parts/state_bar";
import { go, href, linkTo } from "../router";

const LEARNING = "rollout/reward,rollout/accuracy,eval/solved,eval/solved_low,eval/solved_high,eval/reward,eval/reward_low,eval/reward_high";

export function OverviewPage({ run }: { run: Overview }) {
  const series = useResource<SeriesAnswer>(apiPath("series", { metrics: LEARNING, points: 600 }), useTick(4000));
  const { learning, progress, flow, freshness, law, audit } = run;
  const lagTone: Tone = freshness.lag_max !== null && freshness.bound !== null && freshness.lag_max > freshness.bound ? "bad" : "";
  const evaluation = learning.evaluation;
  return (
    <Page title="Overview" about={`${run.path}${run.created ? `, started ${dateTime(run.created)}` : ""}`}>
      <div class="stats seven">
        <Stat label="Reward" value={number(learning.reward.last)} note={change(learning.reward)} link={href("metrics")}>
          <Spark values={run.sparklines.reward} tone={1} />
        </Stat>
        <Stat label="Solved" value={percent(learning.solved.last)} note={change(learning.solved, percent)} link={href("tasks")}>
          <Spark values={run.sparklines.solved} tone={2} />
        </Stat>
        {evaluation ? (
          <Stat label={evaluation.solved === null ? "Held-out reward" : "Held-out tasks"} unit={`step ${evaluation.step}`} {...headline(evaluation)} />
        ) : (
          <Stat label="Held-out tasks" value="–" note={<span title="Set evaluation.every_steps to evaluate held-out tasks during the run.">not evaluated</span>} />
        )}
        <Stat label="Progress" value={count(progress.step ?? 0)} unit={progress.total_steps ? `of ${count(progress.total_steps)}` : "steps"} note={pace(run)} link={href("steps")}>
          {progress.total_steps ? <Meter share={(progress.step ?? 0) / progress.total_steps} label="Steps done" /> : null}
        </Stat>
        <Stat label="Trainer busy" value={percent(flow.trainer_utilisation)} note={flow.tokens_per_s === null ? undefined : `${count(flow.tokens_per_s)} tokens/s`} link={href("timeline")}>
          <Spark values={run.sparklines.tokens_per_s} tone={3} />
        </Stat>
        <Stat label="Lag" value={number(freshness.lag_max)} unit={`bound ${number(freshness.bound)}`} note={`${freshness.lag_mean === null ? "" : `mean ${number(freshness.lag_mean, 2)} versions, `}policy “${freshness.policy ?? "–"}”`} tone={lagTone} link={href("freshness")} />
        <Stat
          label="Conservation law"
          value={law === null ? "–" : law.holds ? "holds" : "violated"}
          tone={law === null ? "" : law.holds ? "good" : "bad"}
          note={audit ? `audit ${audit.ok ? "passed" : "failed"} at ${clock(audit.at)}` : law === null ? "the ledger cannot be read" : `${plural(law.opened, "group")}, not audited yet`}
          link={href("law")}
        />
      </div>
      <div class="grid">
        <Panel span={8}>
          <Learning series={series.data?.series ?? {}} />
        </Panel>
        <Panel span={4} title="Problems" more={run.problems.length ? plural(run.problems.length, "finding") : undefined}>
          <Problems problems={run.problems} />
        </Panel>
        <Scores />
        <Panel span={8} title="Where the groups are" more={law ? `${plural(law.opened, "group")} opened` : undefined}>
          {law ? <StateBar law={law} /> : <Empty title="The ledger cannot be read." />}
        </Panel>
        <Panel span={4} title="Who waits for whom" more={<a href={href("fleet")}>fleet</a>}>
          <div class="stack">
            <p>{flow.sentence ?? "Nothing was trained yet."}</p>
            <div class="row small muted">
              <span>
                in flight <b>{number(flow.in_flight)}</b>
              </span>
              <span>
                queued <b>{number(flow.queued)}</b>
              </span>
              <span>
                may start now <b>{number(flow.capacity)}</b>
              </span>
              {flow.gate ? <Badge tone={flow.gate === "open" ? "good" : ""}>gate {flow.gate}</Badge> : null}
            </div>
            <div class="row">
              {run.processes.map((process) => (
                <Badge key={process.name} tone={process.alive ? "good" : run.state === "running" ? "bad" : ""}>
                  {process.name}
                  {process.restarts ? `, ${plural(process.restarts, "restart")}` : ""}
                </Badge>
              ))}
            </div>
          </div>
        </Panel>
      </div>
    </Page>
  );
}

function change({ first_tenth, last_tenth }: Trend, write: (value: number | null) => string = (value) => number(value, 2)): string | undefined {
  return first_tenth === null || last_tenth === null ? undefined : `${write(first_tenth)} → ${write(last_tenth)}`;
}

function pace({ state, progress }: Overview): string {
  const time = state === "running" && progress.eta_s !== null ? `${duration(progress.eta_s)} left` : `${duration(progress.elapsed_s)} elapsed`;
  return progress.seconds_per_step === null ? time : `${time}, ${duration(progress.seconds_per_step)} a step`;
}

/** The solve rate; the reward where it is not known whether tasks are solved. */
function headline({ solved, low, high, reward, reward_low, reward_high, tasks }: Evaluation): { value: string; note: string } {
  const text = (value: number | null, from: number | null, to: number | null, write: (value: number | null) => string) => ({
    value: write(value),
    note: `95% interval ${write(from)} to ${write(to)}, ${plural(tasks, "task")}`,
  });
  return solved === null ? text(reward, reward_low, reward_high, (value) => number(value)) : text(solved, low, high, (value) => percent(value));
}

function Learning({ series }: { series: Record<string, Points> }) {
  const reward = series["rollout/reward"];
  const isJudged = (series["eval/solved"]?.y ?? []).some((value) => value !== null);
  const heldOut = isJudged ? "eval/solved" : "eval/reward";
  const { x, columns } = align([reward, series["rollout/accuracy"], series[heldOut], series[`${heldOut}_low`], series[`${heldOut}_high`]]);
  const [rewards, solved, held, low, high] = columns as [Column, Column, Column, Column, Column];
  const hasEvaluation = held.some((value) => value !== null);
  return (
    <Chart
      title="Is it learning?"
      x={x}
      height={250}
      series={[
        { label: "reward", values: rewards, tone: 0 },
        { label: "solved", values: solved, tone: 1 },
        ...(hasEvaluation ? [{ label: isJudged ? "solved, held-out tasks" : "reward, held-out tasks", values: held, tone: 4, points: true }] : []),
      ]}
      band={hasEvaluation ? { of: 2, low, high } : undefined}
      onPick={(step) => go(href("steps", [step]))}
    />
  );
}

const SCORE = "reward/";
const UNSCORED = "_unscored";
const JUDGE = ["judge/requests", "judge/failed", "judge/cached", "judge/cost"];

/** The value of each reward function, what judges cost, and how far the policy is from its teacher. Nothing for a run without them. */
function Scores() {
  const tick = useTick(8000);
  const catalogue = useResource<SeriesAnswer>(apiPath("series"), tick);
  const known = catalogue.data?.metrics ?? [];
  const has = (name: string) => known.some((metric) => metric.name === name);
  // Other metrics of rewards have no share of unscored samples.
  const functions = known.map((metric) => metric.name).filter((name) => name.startsWith(SCORE) && has(name + UNSCORED));
  const isJudged = has("judge/requests");
  const isTaught = has("train/teacher_kl");
  const wanted = [...functions, ...(isJudged ? JUDGE : []), ...(isTaught ? ["train/teacher_kl"] : [])];
  const answer = useResource<SeriesAnswer>(wanted.length ? apiPath("series", { metrics: wanted.join(","), points: 600 }) : null, tick);
  if (wanted.length === 0) return null;
  const series = answer.data?.series ?? {};
  // Without a weight, the reward of the environment is 0 for every sample.
  const shown = functions.filter((name) => name !== "reward/environment" || series[name]?.y.some((value) => value));
  const { x, columns } = align(shown.map((name) => series[name]));
  return (
    <>
      {shown.length ? (
        <Panel span={isJudged || isTaught ? 8 : 12}>
          <Chart title="Reward functions" x={x} height={180} series={shown.map((name, at) => ({ label: name.slice(SCORE.length), values: columns[at] ?? [] }))} />
        </Panel>
      ) : null}
      {isJudged || isTaught ? (
        <Panel span={shown.length ? 4 : 12} title={isJudged ? (isTaught ? "Judges and teacher" : "Judges") : "Teacher"} more={<a href={href("metrics", [], { like: isJudged ? "judge/" : "teacher" })}>charts</a>}>
          <Facts rows={[...(isJudged ? judgeRows(series) : []), ...(isTaught ? teacherRows(series, known) : [])]} />
        </Panel>
      ) : null}
    </>
  );
}

/** Each point is a sum over the samples since the one before. */
function judgeRows(series: Record<string, Points>): [string, string][] {
  const total = (name: string) => (series[name]?.y ?? []).reduce<number>((sum, value) => sum + (value ?? 0), 0);
  const cost = total("judge/cost");
  return [
    ["requests", count(total("judge/requests"))],
    ["failed", count(total("judge/failed"))],
    ["answers from the cache", count(total("judge/cached"))],
    ["cost", cost ? number(cost, 4) : "– (no price is set)"],
  ];
}

function teacherRows(series: Record<string, Points>, known: Metric[]): [string, string][] {
  const values = (series["train/teacher_kl"]?.y ?? []).filter((value) => value !== null);
  const unit = known.find((metric) => metric.name === "train/teacher_kl")?.unit ?? "";
  return [["distance to the teacher", values.length ? `${number(values[0] ?? null, 3)} → ${number(values.at(-1) ?? null, 3)} ${unit}` : "–"]];
}

const TONES: Record<Problem["severity"], Tone> = { error: "bad", warning: "warn", info: "info" };

function Problems({ problems }: { problems: Problem[] }) {
  if (problems.length === 0) return <Empty title="No problems.">All processes report, and nothing was lost.</Empty>;
  return (
    <ul class="problems">
      {problems.map((problem) => (
        <li key={problem.kind + problem.text}>
          <span class={`dot ${TONES[problem.severity]}`} role="img" aria-label={problem.severity} />
          <span>
            {problem.text} {problem.link ? <a href={linkTo(problem.link)}>Show</a> : null}
          </span>
        </li>
      ))}
    </ul>
  );
}
