import com.fasterxml.jackson.annotation.JsonIgnoreProperties;
import com.fasterxml.jackson.annotation.JsonProperty;
import java.util.List;

/**
 * What a run is to do; the Go program reads the same document and explains it.
 *
 * @param ca file of the authority to trust, which switches TLS on; null for none
 * @param ignorePurged whether the client may miss that documents are gone
 * @param noopSeconds seconds between noops; 0 for the client's own choice
 * @param mitigateRollbacks milliseconds between looks at what is persisted; 0 for none
 * @param count whether changes are only counted, for measuring
 */
@JsonIgnoreProperties(ignoreUnknown = true)
record Job(
    List<String> nodes,
    String ca,
    String bucket,
    String username,
    String password,
    String resume,
    String save,
    boolean follow,
    int buffer,
    boolean collections,
    List<Long> filter,
    @JsonProperty("ignore_purged") boolean ignorePurged,
    @JsonProperty("no_value") boolean noValue,
    String compression,
    @JsonProperty("noop_seconds") int noopSeconds,
    @JsonProperty("mitigate_rollbacks") int mitigateRollbacks,
    boolean count) {}
