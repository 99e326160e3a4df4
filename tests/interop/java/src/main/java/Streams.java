import com.couchbase.client.dcp.highlevel.CollectionCreated;
import com.couchbase.client.dcp.highlevel.CollectionDropped;
import com.couchbase.client.dcp.highlevel.DatabaseChangeListener;
import com.couchbase.client.dcp.highlevel.Deletion;
import com.couchbase.client.dcp.highlevel.DocumentChange;
import com.couchbase.client.dcp.highlevel.FailoverLog;
import com.couchbase.client.dcp.highlevel.Mutation;
import com.couchbase.client.dcp.highlevel.Rollback;
import com.couchbase.client.dcp.highlevel.SeqnoAdvanced;
import com.couchbase.client.dcp.highlevel.SnapshotDetails;
import com.couchbase.client.dcp.highlevel.StreamEnd;
import com.couchbase.client.dcp.highlevel.StreamFailure;
import com.couchbase.client.dcp.highlevel.StreamOffset;
import com.couchbase.client.dcp.message.SnapshotMarkerFlag;
import com.couchbase.client.dcp.message.StreamEndReason;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Collectors;
import java.util.zip.CRC32;

/** Observes the streams of all vBuckets and checks each event against those before. */
final class Streams implements DatabaseChangeListener {
  private final Report report;
  private final boolean follow;
  private final Map<Integer, Stream> streams = new TreeMap<>();
  private boolean closing;

  private static final class Stream {
    Position at;
    // The newest branch of the last failover log; null before the first.
    String vbuuid;
    // Where rollbacks have taken it that are not yet followed by a new stream.
    final List<Position> rollbacks = new ArrayList<>();
    long items;
    boolean ended;

    /**
     * Items that arrive together with the answer to the stream request can overtake it within the
     * client, which then gives them no branch.
     */
    Position position() {
      return at.seqno() != 0 && at.vbuuid().equals("0") && vbuuid != null ? at.on(vbuuid) : at;
    }
  }

  Streams(Report report, boolean follow) {
    this.report = report;
    this.follow = follow;
  }

  /** Says where a vBucket's stream begins, before it is opened. */
  synchronized void add(int vbucket, Position at) {
    Stream stream = new Stream();
    stream.at = at;
    streams.put(vbucket, stream);
  }

  /** A vBucket that has not come to its end; null if there is none. */
  synchronized Integer missing(Map<Integer, Long> ends) {
    for (Map.Entry<Integer, Stream> entry : streams.entrySet()) {
      Stream stream = entry.getValue();
      boolean there =
          follow ? stream.at.seqno() >= ends.getOrDefault(entry.getKey(), 0L) : stream.ended;
      if (!there) {
        return entry.getKey();
      }
    }
    return null;
  }

  synchronized Map<Integer, Position> positions() {
    return streams.entrySet().stream()
        .collect(Collectors.toMap(Map.Entry::getKey, entry -> entry.getValue().position()));
  }

  /** From now on it is no surprise that streams end. */
  synchronized void close() {
    closing = true;
    streams.forEach(
        (vbucket, stream) ->
            report.print(
                "vbucket", "vb", vbucket, "items", stream.items, "seqno", stream.at.seqno()));
  }

  private synchronized void reach(int vbucket, StreamOffset offset) {
    Stream stream = streams.get(vbucket);
    long seqno = offset.getSeqno();
    if (seqno <= stream.at.seqno()) {
      report.surprise(vbucket, "item " + seqno + " after item " + stream.at.seqno());
    }
    // The offset's own constructor refuses a seqno outside of its snapshot.
    if (offset.getVbuuid() == 0 && stream.vbuuid != null) {
      report.surprise(vbucket, "item " + seqno + " is of no branch");
    }
    stream.at = Position.of(offset);
    stream.items++;
  }

  private void change(DocumentChange change, String operation) {
    reach(change.getVbucket(), change.getOffset());
    CRC32 crc = new CRC32();
    crc.update(change.getContent());
    report.print(
        "change",
        "vb", change.getVbucket(),
        "op", operation,
        "seqno", change.getOffset().getSeqno(),
        "cas", change.getCas(),
        "rev", change.getRevision(),
        "collection", change.getCollection().id(),
        "key", change.getKey(),
        "size", change.getContent().length,
        "crc", crc.getValue());
    change.flowControlAck();
  }

  @Override
  public void onMutation(Mutation mutation) {
    change(mutation, "mutation");
  }

  @Override
  public void onDeletion(Deletion deletion) {
    change(deletion, deletion.isDueToExpiration() ? "expiration" : "deletion");
  }

  @Override
  public void onSeqnoAdvanced(SeqnoAdvanced advanced) {
    reach(advanced.getVbucket(), advanced.getOffset());
    report.print(
        "advanced", "vb", advanced.getVbucket(), "seqno", advanced.getOffset().getSeqno());
  }

  @Override
  public void onCollectionCreated(CollectionCreated created) {
    report.print("system", "vb", created.getVbucket(), "event", "create_collection");
  }

  @Override
  public void onCollectionDropped(CollectionDropped dropped) {
    report.print("system", "vb", dropped.getVbucket(), "event", "delete_collection");
  }

  @Override
  public void onSnapshot(SnapshotDetails snapshot) {
    report.print(
        "marker",
        "vb", snapshot.getVbucket(),
        "start", snapshot.getMarker().getStartSeqno(),
        "end", snapshot.getMarker().getEndSeqno(),
        "memory", snapshot.getFlags().contains(SnapshotMarkerFlag.MEMORY),
        "disk", snapshot.getFlags().contains(SnapshotMarkerFlag.DISK));
  }

  @Override
  public void onFailoverLog(FailoverLog log) {
    String newest = Long.toUnsignedString(log.getEntries().get(0).getUuid());
    synchronized (this) {
      Stream stream = streams.get(log.getVbucket());
      stream.vbuuid = newest;
      stream.rollbacks.stream()
          .min(Comparator.comparing(Position::seqno))
          .ifPresent(
              at -> {
                stream.at = at;
                stream.rollbacks.remove(at);
                stream.rollbacks.removeIf(other -> other.seqno() > at.seqno());
              });
    }
    report.print(
        "opened",
        "vb", log.getVbucket(),
        "log",
        log.getEntries().stream()
            .map(entry -> new String[] {
              Long.toUnsignedString(entry.getUuid()), Long.toUnsignedString(entry.getSeqno())})
            .toList());
  }

  @Override
  public void onRollback(Rollback rollback) {
    synchronized (this) {
      Stream stream = streams.get(rollback.getVbucket());
      long to = rollback.getSeqno();
      report.print(
          "rollback", "vb", rollback.getVbucket(), "from", stream.at.seqno(), "to", to);
      // Where a node fails, the client asks twice for a stream, is told twice to roll back, and does
      // so twice: what comes after may come again.
      if (to >= stream.at.seqno() && stream.rollbacks.isEmpty()) {
        report.surprise(
            rollback.getVbucket(), "at " + stream.at.seqno() + " it is to roll back to " + to);
      }
      stream.at = new Position("0", to, to, to, 0);
      stream.rollbacks.add(stream.at);
    }
    rollback.resume();
  }

  @Override
  public void onStreamEnd(StreamEnd end) {
    synchronized (this) {
      report.print("end", "vb", end.getVbucket(), "reason", end.getReason().toString());
      boolean ok = end.getReason().equals(StreamEndReason.OK);
      if (ok && !follow) {
        streams.get(end.getVbucket()).ended = true;
      } else if (!closing && (ok || !follow)) {
        report.surprise(end.getVbucket(), "the stream ended: " + end.getReason());
      }
    }
  }

  @Override
  public void onFailure(StreamFailure failure) {
    report.surprise(failure.getVbucket(), "the client failed: " + failure.getCause());
  }
}
