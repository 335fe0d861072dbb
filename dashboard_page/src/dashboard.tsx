// The dashboard: frame, navigation, and one component per page.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { type Overview, type Runs, apiPath, post, useResource } from "./api";
import { duration } from "./format";
import { connect, useLive, useTick } from "./live";
import { Meter, Notice, State } from "./parts/basic";
import { href, setFilters, useRoute } from "./router";
import { ActionsPage } from "./pages/actions";
import { ComparePage } from "./pages/compare";
import { ConfigPage } from "./pages/config";
import { FleetPage } from "./pages/fleet";
import { FreshnessPage } from "./pages/freshness";
import { GroupPage } from "./pages/group";
import { HealthPage } from "./pages/health";
import { LawPage } from "./pages/law";
import { MetricsPage } from "./pages/metrics";
import { OverviewPage } from "./pages/overview";
import { RolloutPage } from "./pages/rollout";
import { RolloutsPage } from "./pages/rollouts";
import { StepPage } from "./pages/step";
import { StepsPage } from "./pages/steps";
import { TasksPage } from "./pages/tasks";
import { TimelinePage } from "./pages/timeline";

type PageProps = { run: Overview; runs: Runs };

const PAGES: Record<string, { title: string; view: (props: PageProps) => preact.JSX.Element }> = {
  overview: { title: "Overview", view: ({ run }) => <OverviewPage run={run} /> },
  metrics: { title: "Metrics", view: () => <MetricsPage /> },
  steps: { title: "Steps", view: () => <StepsOrStep /> },
  timeline: { title: "Timeline", view: ({ run }) => <TimelinePage isRunning={run.state === "running"} /> },
  freshness: { title: "Freshness", view: () => <FreshnessPage /> },
  law: { title: "Conservation law", view: () => <LawPage /> },
  rollouts: { title: "Rollouts", view: () => <RolloutsPage /> },
  rollout: { title: "Rollout", view: ({ runs }) => <RolloutPage runs={runs} /> },
  group: { title: "Group", view: () => <GroupPage /> },
  tasks: { title: "Tasks", view: () => <TasksPage /> },
  fleet: { title: "Fleet", view: () => <FleetPage /> },
  health: { title: "Health", view: () => <HealthPage /> },
  actions: { title: "Actions", view: ({ runs }) => <ActionsPage runs={runs} /> },
  config: { title: "Config", view: () => <ConfigPage /> },
  compare: { title: "Compare", view: ({ runs }) => <ComparePage runs={runs} /> },
};

const NAVIGATION: [heading: string, pages: string[]][] = [
  ["", ["overview"]],
  ["Training", ["metrics", "steps", "timeline", "freshness"]],
  ["Data", ["law", "rollouts", "tasks"]],
  ["System", ["fleet", "health", "actions", "config"]],
  ["Runs", ["compare"]],
];
const PARENTS: Record<string, string> = { rollout: "rollouts", group: "rollouts" };

function StepsOrStep() {
  const { parts } = useRoute();
  return parts[0] ? <StepPage step={Number(parts[0])} /> : <StepsPage />;
}

function App() {
  const route = useRoute();
  const selected = route.query.get("run");
  useEffect(connect, [selected]);
  const tick = useTick(2000);
  const runs = useResource<Runs>("/api/runs", useTick(10_000));
  const run = useResource<Overview>(apiPath("run"), tick);
  const page = PAGES[route.page];
  const name = run.data?.name;
  // On a narrow screen the navigation is one line that scrolls.
  useEffect(() => document.querySelector(".nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }), [route.page]);
  useEffect(() => {
    document.title = [page?.title ?? "Not found", name, "Rollbook"].filter(Boolean).join(" · ");
  }, [page, name]);

  if (run.error?.status === 401) return <Login />;
  return (
    <div class="shell">
      <a class="skip" href="#page">
        Skip to the page
      </a>
      <aside class="side">
        <a class="brand" href={href("overview")} aria-label="Rollbook: overview">
          <svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
            <path d="M4 5.5A2.5 2.5 0 0 1 6.500 3H20v18H6.500A2.500 2.500 0 0 1 4 18.500z" />
            <path d="M8.500 15l3-4 2.500 2.500L17 8.500" />
          </svg>
          <span>Rollbook</span>
        </a>
        <nav class="nav" aria-label="Pages">
          {NAVIGATION.map(([heading, pages]) => [
            heading ? <div class="nav-head">{heading}</div> : null,
            ...pages.map((id) => (
              <a key={id} href={href(id)} aria-current={(PARENTS[route.page] ?? route.page) === id ? "page" : undefined}>
                {PAGES[id]!.title}
              </a>
            )),
          ])}
        </nav>
        <div class="side-foot">{runs.data ? `version ${runs.data.version}` : ""}</div>
      </aside>
      <div class="main">
        <Bar run={run.data} runs={runs.data} selected={selected} />
        <main class="page" id="page" tabIndex={-1}>
          <RunState run={run.data} error={run.error?.message ?? null} />
          {page && run.data && runs.data ? <page.view run={run.data} runs={runs.data} key={`${route.page} ${selected}`} /> : null}
          {page && !run.data && !run.error ? (
            <div class="loading" role="status">
              Loading…
            </div>
          ) : null}
          {!page ? (
            <Notice tone="warn" title="There is no such page.">
              <a href={href("overview")}>Open the overview</a>
            </Notice>
          ) : null}
        </main>
      </div>
    </div>
  );
}

function Bar({ run, runs, selected }: { run: Overview | null; runs: Runs | null; selected: string | null }) {
  const { connection } = useLive();
  const total = run?.progress.total_steps ?? null;
  const step = run?.progress.step ?? null;
  const isLive = connection === "live" && run?.state === "running";
  return (
    <header class="bar">
      {runs && runs.runs.length > 1 ? (
        <select aria-label="Run" value={selected ?? run?.key ?? ""} onChange={(event) => setFilters({ run: (event.target as HTMLSelectElement).value })}>
          {runs.runs.map((one) => (
            <option key={one.key} value={one.key}>
              {one.key}
              {one.name !== one.key ? ` (${one.name})` : ""}
            </option>
          ))}
        </select>
      ) : (
        <span class="run-name" title={run?.path}>
          {run?.name ?? ""}
        </span>
      )}
      {run ? <State state={run.state} /> : null}
      {connection === "lost" ? (
        <span class="badge bad">
          <span class="dot" /> connection lost
        </span>
      ) : isLive ? (
        <span class="muted small row" title="Values move as the run goes on">
          <span class="dot pulse good" /> live
        </span>
      ) : null}
      {run ? (
        <div class="bar-progress">
          <span>
            step <b>{step ?? 0}</b>
            {total ? ` of ${total}` : ""}
          </span>
          {total ? <Meter share={(step ?? 0) / total} label="Progress" /> : null}
          {run.state === "running" && run.progress.eta_s !== null ? <span>{duration(run.progress.eta_s)} left</span> : null}
          {run.actions.paused || run.actions.draining ? (
            <a class="badge warn" href={href("actions")}>
              {run.actions.draining ? "draining" : "admission paused"}
            </a>
          ) : null}
        </div>
      ) : null}
    </header>
  );
}

/** What keeps the run from being read, on every page. */
function RunState({ run, error }: { run: Overview | null; error: string | null }) {
  const { problem, connection } = useLive();
  return (
    <>
      {error ? (
        <Notice tone="bad" title="The run cannot be read.">
          {error}
        </Notice>
      ) : null}
      {!error && run?.problem ? (
        <Notice tone="bad" title="The run cannot be read completely.">
          {run.problem}
        </Notice>
      ) : null}
      {!error && problem && problem !== run?.problem ? (
        <Notice tone="bad" title="The ledger cannot be read.">
          {problem}
        </Notice>
      ) : null}
      {!error && connection === "lost" ? (
        <Notice tone="warn" title="The dashboard does not answer.">
          The values below are the last ones received. The run itself continues without the dashboard.
        </Notice>
      ) : null}
    </>
  );
}

function Login() {
  const [error, setError] = useState<string | null>(null);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const token = new FormData(event.target as HTMLFormElement).get("token");
    try {
      await post("/api/login", { token });
      // Every request of the page failed without the cookie.
      location.reload();
    } catch (failure) {
      setError((failure as Error).message);
    }
  };
  return (
    <main class="page" id="page">
      <h1>Rollbook</h1>
      <form class="panel stack" onSubmit={submit}>
        <label for="token">This dashboard needs a token. The dashboard printed the name of its file when it started.</label>
        <div class="row">
          <input id="token" name="token" type="password" autocomplete="current-password" required />
          <button class="button primary">Open</button>
        </div>
        {error ? <Notice tone="bad">{error}</Notice> : null}
      </form>
    </main>
  );
}

render(<App />, document.getElementById("app")!);
