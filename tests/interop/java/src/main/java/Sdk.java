import static com.couchbase.client.java.kv.LookupInSpec.get;
import static com.couchbase.client.java.kv.UpsertOptions.upsertOptions;

import com.couchbase.client.core.error.CouchbaseException;
import com.couchbase.client.core.msg.kv.DurabilityLevel;
import com.couchbase.client.java.Bucket;
import com.couchbase.client.java.Cluster;
import com.couchbase.client.java.ClusterOptions;
import com.couchbase.client.java.Collection;
import com.couchbase.client.java.json.JsonObject;
import com.couchbase.client.java.kv.ScanType;
import com.couchbase.client.java.search.SearchQuery;
import com.couchbase.client.java.transactions.TransactionGetResult;
import com.couchbase.client.java.transactions.error.TransactionFailedException;
import com.fasterxml.jackson.core.JsonParser;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Writes durably, reads replicas and runs transactions with the Java SDK, and prints what came of it
 * as JSON lines. Standard input tells one {@link Job}.
 */
public final class Sdk {
  /** As patient as the machine may be slow. */
  private static final Duration PATIENCE = Duration.ofSeconds(60);

  private final Report report = new Report();
  private final Cluster cluster;
  private final Bucket bucket;
  private final Collection documents;

  private Sdk(Cluster cluster, Job job) {
    this.cluster = cluster;
    bucket = cluster.bucket(job.bucket());
    bucket.waitUntilReady(PATIENCE);
    documents = bucket.defaultCollection();
  }

  public static void main(String[] arguments) throws Exception {
    Job job;
    try (JsonParser input = Report.JSON.createParser(System.in)) {
      job = input.readValueAs(Job.class);
    }
    ClusterOptions options =
        ClusterOptions.clusterOptions(job.username(), job.password())
            .environment(
                environment ->
                    environment.timeoutConfig(
                        timeouts ->
                            timeouts
                                .connectTimeout(PATIENCE)
                                .kvTimeout(PATIENCE)
                                .kvDurableTimeout(PATIENCE)));
    String nodes = "couchbase://" + String.join(",", job.nodes());
    Report report = new Report();
    String error = "";
    try (Cluster cluster = Cluster.connect(nodes, options)) {
      Sdk sdk = new Sdk(cluster, job);
      sdk.writeDurably();
      sdk.readReplicas();
      sdk.runTransactions();
      sdk.askForMore();
      sdk.report.flush();
    } catch (Exception e) {
      e.printStackTrace();
      error = e.toString();
    }
    report.print("done", "error", error);
    report.flush();
    System.exit(0);
  }

  private static JsonObject number(int n) {
    return JsonObject.create().put("n", n);
  }

  private void writeDurably() {
    int n = 0;
    for (DurabilityLevel level : DurabilityLevel.values()) {
      documents.upsert(level.name(), number(n++), upsertOptions().durability(level));
    }
  }

  private void readReplicas() {
    for (DurabilityLevel level : DurabilityLevel.values()) {
      String key = level.name();
      documents
          .getAllReplicas(key)
          .forEach(copy -> print("getAllReplicas", key, copy.isReplica(), copy.contentAsObject()));
      documents
          .lookupInAllReplicas(key, List.of(get("n")))
          .forEach(
              copy ->
                  print(
                      "lookupInAllReplicas",
                      key,
                      copy.isReplica(),
                      number(copy.contentAs(0, Integer.class))));
    }
  }

  private void print(String call, String key, boolean isReplica, JsonObject content) {
    report.print(
        "copy", "call", call, "key", key, "is_replica", isReplica, "n", content.getInt("n"));
  }

  private void runTransactions() {
    documents.upsert("giver", number(100));
    documents.upsert("old", number(0));
    cluster
        .transactions()
        .run(
            context -> {
              TransactionGetResult giver = context.get(documents, "giver");
              context.replace(giver, number(60));
              context.insert(documents, "taker", number(40));
              context.remove(context.get(documents, "old"));
            });
    try {
      cluster
          .transactions()
          .run(
              context -> {
                context.replace(context.get(documents, "giver"), number(0));
                context.insert(documents, "never", number(0));
                throw new IllegalStateException("no");
              });
    } catch (TransactionFailedException e) {
      report.print("rolled back", "cause", String.valueOf(e.getCause().getMessage()));
    }
  }

  /** What a cluster that has a data service only does not do. */
  private void askForMore() {
    Map<String, Runnable> calls = new LinkedHashMap<>();
    calls.put("scan", () -> documents.scan(ScanType.prefixScan("a")).count());
    calls.put("query", () -> cluster.query("SELECT 1"));
    calls.put("searchQuery", () -> cluster.searchQuery("index", SearchQuery.matchAll()));
    calls.put("analyticsQuery", () -> cluster.analyticsQuery("SELECT 1"));
    calls.put("viewQuery", () -> bucket.viewQuery("design", "view"));
    calls.forEach(
        (name, call) -> {
          long started = System.nanoTime();
          String answer = "";
          try {
            call.run();
          } catch (CouchbaseException e) {
            answer = e.getClass().getSimpleName();
          }
          double seconds = (System.nanoTime() - started) / 1e9;
          report.print("refused", "call", name, "error", answer, "seconds", seconds);
        });
  }
}
