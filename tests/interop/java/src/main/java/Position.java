import com.couchbase.client.dcp.highlevel.SnapshotMarker;
import com.couchbase.client.dcp.highlevel.StreamOffset;
import com.fasterxml.jackson.annotation.JsonProperty;

/** Where a stream is: what is kept of it between runs. */
record Position(
    String vbuuid,
    long seqno,
    @JsonProperty("snapshot_start") long snapshotStart,
    @JsonProperty("snapshot_end") long snapshotEnd,
    @JsonProperty("manifest_uid") long manifestUid) {

  static final Position BEGINNING = of(StreamOffset.ZERO);

  static Position of(StreamOffset offset) {
    return new Position(
        Long.toUnsignedString(offset.getVbuuid()),
        offset.getSeqno(),
        offset.getSnapshot().getStartSeqno(),
        offset.getSnapshot().getEndSeqno(),
        offset.getCollectionsManifestUid());
  }

  Position on(String branch) {
    return new Position(branch, seqno, snapshotStart, snapshotEnd, manifestUid);
  }

  StreamOffset offset() {
    return new StreamOffset(
        Long.parseUnsignedLong(vbuuid),
        seqno,
        new SnapshotMarker(snapshotStart, snapshotEnd),
        manifestUid);
  }
}
