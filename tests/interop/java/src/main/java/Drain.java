import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.SecurityConfig;
import com.couchbase.client.dcp.config.CompressionMode;
import com.couchbase.client.dcp.config.DcpControl;
import com.couchbase.client.dcp.highlevel.FlowControlMode;
import com.couchbase.client.dcp.message.StreamFlag;
import com.couchbase.client.dcp.state.PartitionState;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.type.TypeReference;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;

/**
 * Drains a bucket with java-dcp-client and prints what it is sent as JSON lines.
 *
 * <p>Standard input tells one {@link Job} after another. A job ends with a line of the kind "done",
 * which tells an error, if any; a surprise is one: something that a producer which keeps to the
 * protocol does not do.
 */
public final class Drain {
  /** How long anything may take. */
  private static final Duration PATIENCE = Duration.ofSeconds(60);

  /** The client insists on so many. */
  private static final int MAX_VBUCKETS = 1024;

  private final Job job;
  private final JsonParser input;
  private final Report report = new Report();
  private final Streams streams;
  private final Map<Integer, Long> ends = new HashMap<>();

  private Drain(Job job, JsonParser input) {
    this.job = job;
    this.input = input;
    this.streams = new Streams(report, job.follow());
  }

  public static void main(String[] arguments) throws Exception {
    try (JsonParser input = Report.JSON.createParser(System.in)) {
      while (input.nextToken() != null) {
        new Drain(input.readValueAs(Job.class), input).work();
      }
    }
    // The client leaves threads behind.
    System.exit(0);
  }

  private void work() {
    String error = "";
    try (Client client = client()) {
      if (job.count()) {
        count(client);
      } else {
        client.listener(streams, FlowControlMode.MANUAL);
        run(client);
      }
    } catch (Exception e) {
      e.printStackTrace();
      error = e.toString();
    }
    int surprises = report.surprises();
    if (error.isEmpty() && surprises > 0) {
      error = surprises + " surprises, see the lines of that kind";
    }
    report.print("done", "error", error);
    report.flush();
  }

  private Client client() {
    Client.Builder builder =
        Client.builder()
            .seedNodes(job.nodes())
            .bucket(job.bucket())
            .credentials(job.username(), job.password())
            .userAgent("dcp-rs-interop", "0")
            .collectionsAware(job.collections())
            .noValue(job.noValue())
            .xattrs(true)
            .compression(
                switch (job.compression()) {
                  case "forced" -> CompressionMode.FORCED;
                  case "on" -> CompressionMode.ENABLED;
                  default -> CompressionMode.DISABLED;
                })
            .configRefreshInterval(Duration.ofSeconds(1));
    if (job.ca() != null) {
      builder.securityConfig(
          SecurityConfig.builder()
              .enableTls(true)
              .trustCertificate(Path.of(job.ca()))
              .build());
    }
    if (job.filter() != null) {
      builder.collectionIds(job.filter());
    }
    if (job.buffer() > 0) {
      builder.flowControl(job.buffer());
    }
    if (job.ignorePurged()) {
      builder.optionalStreamFlags(Set.of(StreamFlag.IGNORE_PURGED_TOMBSTONES));
    }
    if (job.noopSeconds() > 0) {
      builder.controlParam(DcpControl.Names.SET_NOOP_INTERVAL, job.noopSeconds());
    }
    if (job.mitigateRollbacks() > 0) {
      builder.mitigateRollbacks(job.mitigateRollbacks(), TimeUnit.MILLISECONDS);
    }
    return builder.build();
  }

  /** Reads everything up to now and only counts it: a measure of the client alone. */
  private void count(Client client) throws Exception {
    Counter counter = new Counter(client, MAX_VBUCKETS);
    client.connect().block(PATIENCE);
    Map<Integer, Long> high = highSeqnos(client);
    if (high.size() != MAX_VBUCKETS) {
      throw new IllegalStateException("there are " + high.size() + " vBuckets");
    }
    client.sessionState().setToBeginningWithNoEnd(client.numPartitions());
    high.forEach(
        (vbucket, seqno) -> {
          PartitionState state = PartitionState.fromOffset(Position.BEGINNING.offset());
          state.setEndSeqno(seqno);
          client.sessionState().set(vbucket, state);
        });
    long started = System.nanoTime();
    client.startStreaming().block(PATIENCE);
    counter.await(10 * PATIENCE.toSeconds());
    counter.print(report, (System.nanoTime() - started) / 1e9);
    // Whoever measures looks at the process before it says that there is nothing more.
    input.nextToken();
  }

  private void run(Client client) throws Exception {
    client.connect().block(PATIENCE);
    Map<Integer, Position> positions = positions();
    Map<Integer, Long> high = highSeqnos(client);
    if (high.size() != client.numPartitions()) {
      throw new IllegalStateException(
          "nodes tell the high seqnos of " + high.size() + " vBuckets, the map has "
              + client.numPartitions());
    }
    client.sessionState().setToBeginningWithNoEnd(client.numPartitions());
    high.forEach(
        (vbucket, seqno) -> {
          Position at = positions.getOrDefault(vbucket, Position.BEGINNING);
          streams.add(vbucket, at);
          PartitionState state = PartitionState.fromOffset(at.offset());
          state.setEndSeqno(job.follow() ? -1 : seqno);
          client.sessionState().set(vbucket, state);
        });
    client.startStreaming().block(PATIENCE);
    if (job.follow()) {
      report.print("streaming", "streams", high.size());
      report.flush();
      input.nextToken();
      ends.putAll(input.readValueAs(new TypeReference<Map<Integer, Long>>() {}));
    }
    await();
    streams.close();
    if (job.follow()) {
      client.stopStreaming(high.keySet()).block(PATIENCE);
    }
    if (job.save() != null) {
      Files.writeString(Path.of(job.save()), Report.JSON.writeValueAsString(streams.positions()));
    }
  }

  private Map<Integer, Position> positions() throws Exception {
    if (job.resume() == null) {
      return Map.of();
    }
    return Report.JSON.readValue(
        Path.of(job.resume()).toFile(), new TypeReference<Map<Integer, Position>>() {});
  }

  private static Map<Integer, Long> highSeqnos(Client client) {
    return client
        .getSeqnos()
        .collectMap(entry -> entry.partition(), entry -> entry.seqno())
        .block(PATIENCE);
  }

  /** Waits until every stream is where it is to end. */
  private void await() throws InterruptedException {
    long deadline = System.nanoTime() + PATIENCE.toNanos();
    for (Integer missing; (missing = streams.missing(ends)) != null; Thread.sleep(20)) {
      if (System.nanoTime() > deadline) {
        throw new IllegalStateException(
            "vBucket " + missing + " stays at " + streams.positions().get(missing).seqno()
                + (job.follow() ? ", short of " + ends.get(missing) : " without an end"));
      }
    }
  }
}
