// The processes of the run: policy replicas, workers, trainer, environments, producers.
import { type Fleet, apiPath, useResource } from "../api";
import { bytes, clock, count, duration, number, percent } from "../format";
import { useTick } from "../live";
import { Badge, Empty, Loaded, Meter, Page, Panel, State } from "../parts/basic";
import { visible } from "../text";

export function FleetPage() {
  const fleet = useResource<Fleet>(apiPath("fleet"), useTick(3000));
  return (
    <Page title="Fleet" about="What runs where, and how busy it is.">
      <Loaded from={fleet}>
        {(data) => (
          <>
            <Panel title="Processes" flush>
              {data.processes.length === 0 ? (
                <Empty title="No processes are known.">This run is read from its ledger, which does not list them.</Empty>
              ) : (
                <div class="table-box" tabIndex={0}>
                  <table>
                    <thead>
                      <tr>
                        <th>Process</th>
                        <th>Role</th>
                        <th>State</th>
                        <th class="num">Pid</th>
                        <th class="num">Restarts</th>
                        <th class="num">Memory</th>
                        <th class="num">CPU time</th>
                        <th>Last event</th>
                      </tr>
                    </thead>
                    <tbody>
                      {data.processes.map((process) => (
                        <tr key={process.name}>
                          <td>
                            <b>{process.name}</b>
                          </td>
                          <td>{process.role}</td>
                          <td>{process.alive ? <State state={process.state} /> : <Badge>ended</Badge>}</td>
                          <td class="num">{process.pid ?? ""}</td>
                          <td class="num">{process.restarts ? <Badge tone="warn">{process.restarts}</Badge> : 0}</td>
                          <td class="num nowrap">{bytes(process.memory_bytes)}</td>
                          <td class="num nowrap">{duration(process.cpu_s)}</td>
                          <td class="muted">{process.last_event ? `${clock(process.last_event.time)} ${process.last_event.event}` : ""}</td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                </div>
              )}
            </Panel>
            <div class="grid">
              <Panel span={6} title="Policy replicas" flush>
                {data.replicas.length ? (
                  <div class="table-box" tabIndex={0}>
                    <table>
                      <thead>
                        <tr>
                          <th>Replica</th>
                          <th class="num">Publication</th>
                          <th class="num">Busy</th>
                          <th class="num">Tokens/s</th>
                          <th>Last generation</th>
                        </tr>
                      </thead>
                      <tbody>
                        {data.replicas.map((replica) => (
                          <tr key={replica.name}>
                            <td title={replica.url ?? undefined}>
                              <b>{replica.name}</b>
                            </td>
                            <td class="num">{number(replica.publication)}</td>
                            <td class="num">
                              <span class="rate">
                                <Meter share={replica.busy_share} label={`${replica.name} busy`} /> {percent(replica.busy_share)}
                              </span>
                            </td>
                            <td class="num">{count(replica.tokens_per_s)}</td>
                            <td class="muted nowrap">{clock(replica.last_generate)}</td>
                          </tr>
                        ))}
                      </tbody>
                    </table>
                  </div>
                ) : (
                  <Empty title="No replica reported." />
                )}
              </Panel>
              <Panel span={6} title="Rollout workers" flush>
                {data.workers.length ? (
                  <div class="table-box" tabIndex={0}>
                    <table>
                      <thead>
                        <tr>
                          <th class="num">Worker</th>
                          <th class="num">Pid</th>
                          <th>State</th>
                          <th>Ready since</th>
                        </tr>
                      </thead>
                      <tbody>
                        {data.workers.map((worker) => (
                          <tr key={`${worker.worker} ${worker.pid}`}>
                            <td class="num">{worker.worker}</td>
                            <td class="num">{worker.pid ?? ""}</td>
                            <td>{worker.alive ? <Badge tone="good">running</Badge> : <Badge>ended</Badge>}</td>
                            <td class="muted nowrap">{clock(worker.ready_at)}</td>
                          </tr>
                        ))}
                      </tbody>
                    </table>
                  </div>
                ) : (
                  <Empty title="No worker reported." />
                )}
              </Panel>
              {data.producers.length ? (
                <Panel span={6} title="Producers" flush>
                  <div class="table-box" tabIndex={0}>
                    <table>
                      <thead>
                        <tr>
                          <th>Producer</th>
                          <th class="num">Weight</th>
                          <th class="num">Minimum share</th>
                          <th class="num">Credit</th>
                          <th class="num">Groups trained</th>
                        </tr>
                      </thead>
                      <tbody>
                        {data.producers.map((producer) => (
                          <tr key={producer.name}>
                            <td>{visible(producer.name)}</td>
                            <td class="num">{number(producer.weight)}</td>
                            <td class="num">{percent(producer.min_share)}</td>
                            <td class="num">{number(producer.credit)}</td>
                            <td class="num">{count(producer.num_batched)}</td>
                          </tr>
                        ))}
                      </tbody>
                    </table>
                  </div>
                </Panel>
              ) : null}
              <Gauges gauges={data.gauges} />
            </div>
          </>
        )}
      </Loaded>
    </Page>
  );
}

/** The last values of the rollout, the gate and the servers. Metrics of training have their own page. */
function Gauges({ gauges }: { gauges: Fleet["gauges"] }) {
  const shown = Object.entries(gauges).filter(([name]) => !/^(train|perf|fairness|eval)\//.test(name));
  if (shown.length === 0) return null;
  return (
    <Panel title="Gauges" flush>
      <div class="value-grid">
        {shown.map(([name, value]) => (
          <span key={name}>
            <span class="muted">{name}</span> <b>{number(value)}</b>
          </span>
        ))}
      </div>
    </Panel>
  );
}
