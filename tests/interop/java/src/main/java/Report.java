import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;

/** Prints JSON lines. */
final class Report {
  static final ObjectMapper JSON = new ObjectMapper();

  private final PrintStream out =
      new PrintStream(new BufferedOutputStream(System.out, 1 << 16), false, StandardCharsets.UTF_8);
  private int surprises;

  /** Prints one line of the kind given, with names and fields in turn. */
  synchronized void print(String kind, Object... namesAndFields) {
    Map<String, Object> line = new LinkedHashMap<>();
    line.put("line", kind);
    for (int i = 0; i < namesAndFields.length; i += 2) {
      line.put((String) namesAndFields[i], namesAndFields[i + 1]);
    }
    try {
      out.println(JSON.writeValueAsString(line));
    } catch (IOException e) {
      throw new IllegalStateException(e);
    }
  }

  /** What a producer that keeps to the protocol does not do. */
  synchronized void surprise(int vbucket, String what) {
    print("surprise", "vb", vbucket, "what", what);
    surprises++;
  }

  /** How many surprises there were. */
  synchronized int surprises() {
    return surprises;
  }

  /** Hands over what was printed. */
  synchronized void flush() {
    out.flush();
  }
}
