use proptest::prelude::*;
use tokio::net::TcpListener;

use super::*;

const SERVICE: &str = "_couchbases._tcp.cb.example.com";

/// An answer as `dig` shows it: the question, then records whose names point back to it.
fn records(question: &[u8], records: &[(u16, u16, u16, &str)]) -> Vec<u8> {
    let mut message = question.to_vec();
    message[2] = 0x81;
    message[7] = u8::try_from(records.len()).unwrap();
    for &(priority, weight, port, host) in records {
        // "example.com" is spelled by a pointer to the end of the question's name.
        let mut data = [priority, weight, port].map(u16::to_be_bytes).concat();
        for label in host.strip_suffix(".example.com").unwrap_or(host).split('.') {
            data.push(u8::try_from(label.len()).unwrap());
            data.extend_from_slice(label.as_bytes());
        }
        if host.ends_with(".example.com") {
            data.extend_from_slice(&[0xc0, 12 + 12 + 5 + 3]);
        } else {
            data.push(0);
        }
        message.extend_from_slice(&[0xc0, 12, 0, 33, 0, 1, 0, 0, 0, 60, 0]);
        message.push(u8::try_from(data.len()).unwrap());
        message.extend_from_slice(&data);
    }
    message
}

/// A name server that answers each datagram with what `answer` makes of it.
async fn name_server(answer: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 512];
        while let Ok((len, from)) = socket.recv_from(&mut buffer).await {
            for answer in answer(&buffer[..len]) {
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
    address
}

async fn ask_one(server: SocketAddr) -> Result<Vec<String>, SrvError> {
    let nodes = lookup(&[server], SERVICE, "cb.example.com").await?;
    Ok(nodes.iter().map(ToString::to_string).collect())
}

#[tokio::test]
async fn nodes_come_in_the_order_the_records_want() {
    let server = name_server(|question| {
        let listed = [
            (2, 0, 11207, "n3.example.com"),
            (1, 5, 11207, "n2.example.com"),
            (1, 9, 21207, "n1.example.com"),
        ];
        vec![records(question, &listed)]
    });
    let nodes = ask_one(server.await).await.unwrap();
    assert_eq!(nodes, ["n1.example.com:21207", "n2.example.com:11207", "n3.example.com:11207"]);
}

#[tokio::test]
async fn nodes_of_another_domain_are_not_believed() {
    let server = name_server(|question| {
        let listed = [(1, 1, 11207, "evil.org"), (1, 1, 11207, "n1.example.com")];
        vec![records(question, &listed)]
    });
    assert_eq!(ask_one(server.await).await.unwrap(), ["n1.example.com:11207"]);
    let server = name_server(|question| vec![records(question, &[(1, 1, 11207, "evil.org")])]);
    assert!(matches!(ask_one(server.await).await, Err(SrvError::Empty)));
}

#[test]
fn a_domain_is_what_a_host_shares_with_its_neighbours() {
    for (target, host, expected) in [
        ("n1.x.cloud.example.com", "cb.x.cloud.example.com", true),
        ("N1.X.cloud.example.com", "cb.x.cloud.example.com.", true),
        ("n1.y.cloud.example.com", "cb.x.cloud.example.com", false),
        ("cb.example.com", "cb.example.com", true),
        ("notexample.com", "cb.example.com", false),
        (".example.com", "cb.example.com", false),
        ("n1.example.com", "example.com", true),
        ("other.com", "example.com", false),
        ("n1.local", "local", true),
        ("n1", "cb", false),
    ] {
        assert_eq!(is_in_domain(target, host), expected, "{target} by {host}");
    }
}

#[tokio::test]
async fn a_forged_datagram_does_not_hide_the_answer() {
    let server = name_server(|question| {
        let right = records(question, &[(1, 1, 11207, "n1.example.com")]);
        let mut forged = records(question, &[(1, 1, 11207, "n9.example.com")]);
        forged[0] ^= 1;
        vec![forged, right]
    });
    assert_eq!(ask_one(server.await).await.unwrap(), ["n1.example.com:11207"]);
}

#[tokio::test]
async fn an_answer_too_long_for_a_datagram_comes_by_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let socket = UdpSocket::bind(address).await.unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 512];
        let (len, from) = socket.recv_from(&mut buffer).await.unwrap();
        let mut truncated = records(&buffer[..len], &[]);
        truncated[2] |= 0x02;
        socket.send_to(&truncated, from).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut question = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut question).await.unwrap();
        let answer = records(&question, &[(1, 1, 11207, "n1.example.com")]);
        stream.write_u16(u16::try_from(answer.len()).unwrap()).await.unwrap();
        stream.write_all(&answer).await.unwrap();
    });
    assert_eq!(ask_one(address).await.unwrap(), ["n1.example.com:11207"]);
}

#[tokio::test]
async fn a_name_that_does_not_exist_is_an_error() {
    let server = name_server(|question| {
        let mut answer = records(question, &[]);
        answer[3] |= 3;
        vec![answer]
    });
    let error = ask_one(server.await).await.unwrap_err();
    assert!(matches!(error, SrvError::Message(InvalidMessage::Refused(3))), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_name_server_is_given_up_for_the_next() {
    let silent = name_server(|_| Vec::new()).await;
    let servers = [silent, silent];
    let started = tokio::time::Instant::now();
    assert!(matches!(lookup(&servers, SERVICE, "cb.example.com").await, Err(SrvError::Io(_))));
    assert_eq!(started.elapsed().as_secs(), 4);
    assert!(matches!(lookup(&[], SERVICE, "h").await, Err(SrvError::NoNameServer)));
}

#[test]
fn name_servers_are_read_from_the_systems_file() {
    let text = "# comment\nsearch a b\nnameserver 10.0.0.1\nnameserver fd00::1 \nnameserver x\n\
                nameserver 10.0.0.2\nnameserver 10.0.0.3\n";
    let servers: Vec<_> = parse_resolv_conf(text).iter().map(ToString::to_string).collect();
    assert_eq!(servers, ["10.0.0.1:53", "[fd00::1]:53", "10.0.0.2:53"]);
}

#[test]
fn a_name_that_points_to_itself_ends() {
    let question = message::question(7, SERVICE).unwrap();
    let mut answer = records(&question, &[(1, 1, 1, "n1.example.com")]);
    let at = u8::try_from(question.len()).unwrap();
    answer[usize::from(at) + 1] = at;
    assert_eq!(message::answer(&answer, 7, SERVICE), Err(InvalidMessage::Malformed));
}

#[test]
fn names_that_fit_no_question_are_refused() {
    for name in ["", "a..b", &"a".repeat(64), &"a.".repeat(200)] {
        assert_eq!(message::question(1, name), Err(InvalidMessage::Name), "{name}");
    }
}

proptest! {
    #[test]
    fn no_datagram_makes_it_panic(bytes: Vec<u8>) {
        let _ = message::answer(&bytes, 7, SERVICE);
    }

    #[test]
    fn no_change_of_an_answer_makes_it_panic(at in 0_usize..200, byte: u8) {
        let question = message::question(7, SERVICE).unwrap();
        let listed = [(1, 1, 1, "n1.example.com"), (1, 1, 1, "evil.org")];
        let mut answer = records(&question, &listed);
        let len = answer.len();
        answer[at % len] = byte;
        let _ = message::answer(&answer, 7, SERVICE);
        let _ = message::answer(&answer[..at % len], 7, SERVICE);
    }
}
