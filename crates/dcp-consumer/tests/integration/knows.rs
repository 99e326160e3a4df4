//! What a server knows beyond the newest versions, on request.

use dcp_consumer::{End, ErrorKind, Start};
use dcp_test::with;
use tokio::time::timeout;

use crate::embedded::{ANSWER_TIMEOUT, connect, options, producer, read_all};
use crate::rows::Rows;

#[tokio::test]
async fn history_that_a_bucket_does_not_keep_is_refused_at_once() {
    let producer = producer(1, 1).await;
    let client = connect(&producer).await;
    // What was granted to a stream without history says nothing about one with it.
    let mut stream =
        client.stream(options(Start::Earliest, End::Now), Rows::default).await.unwrap();
    read_all(&mut stream).await;
    let with_history = with(options(Start::Earliest, End::Now), |o| o.history = true);
    let opened = timeout(ANSWER_TIMEOUT, client.stream(with_history, Rows::default)).await;
    let error = opened.expect("it is tried again and again").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("7.2 and a bucket stored with Magma"), "{error}");
}
