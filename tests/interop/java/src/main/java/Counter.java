import com.couchbase.client.core.deps.io.netty.buffer.ByteBuf;
import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.events.StreamEndEvent;
import com.couchbase.client.dcp.message.DcpMutationMessage;
import com.couchbase.client.dcp.message.MessageUtil;
import com.couchbase.client.dcp.message.StreamEndReason;
import com.couchbase.client.dcp.transport.netty.ChannelFlowController;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.LongAdder;

/**
 * Does nothing with the changes but count them, in the client's own lowest layer: no object is made
 * of a change.
 */
final class Counter {
  private final LongAdder changes = new LongAdder();
  private final LongAdder bytes = new LongAdder();
  private final CountDownLatch open;
  private volatile String failure = "";

  /** Counts streams that all come to an end, for a client that is not connected yet. */
  Counter(Client client, int streams) {
    open = new CountDownLatch(streams);
    client.dataEventHandler(this::count);
    client.controlEventHandler(
        (flow, event) -> {
          flow.ack(event);
          event.release();
        });
    client.systemEventHandler(
        event -> {
          if (event instanceof StreamEndEvent end) {
            if (!end.reason().equals(StreamEndReason.OK)) {
              failure = "a stream ended: " + end.reason();
            }
            open.countDown();
          }
        });
  }

  private void count(ChannelFlowController flow, ByteBuf event) {
    if (DcpMutationMessage.is(event)) {
      changes.increment();
      bytes.add(MessageUtil.getContent(event).readableBytes());
    }
    flow.ack(event);
    event.release();
  }

  /** Waits for the end of all streams. */
  void await(long seconds) throws InterruptedException {
    if (!open.await(seconds, TimeUnit.SECONDS)) {
      throw new IllegalStateException("only " + changes.sum() + " changes came");
    }
    if (!failure.isEmpty()) {
      throw new IllegalStateException(failure);
    }
  }

  /** Prints what was counted, and in how long. */
  void print(Report report, double seconds) {
    report.print(
        "counted", "changes", changes.sum(), "bytes", bytes.sum(), "seconds", seconds);
    report.flush();
  }
}
