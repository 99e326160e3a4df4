//! Reading in bulk: over a pipe that counts reads, and one that has a low mark as TCP on Linux.

use std::io;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, DuplexStream, ReadBuf};

use super::*;

/// A pipe that is not ready to be read below its mark, if it knows of marks.
struct Marked {
    /// What came from the pipe and is not read.
    held: Vec<u8>,
    shared: Arc<Shared>,
}

struct Shared {
    knows_marks: bool,
    mark: AtomicUsize,
    reads: AtomicUsize,
    reader: Mutex<Option<Waker>>,
}

impl Shared {
    fn new(knows_marks: bool) -> Arc<Self> {
        let (mark, reads) = (AtomicUsize::new(1), AtomicUsize::new(0));
        Arc::new(Self { knows_marks, mark, reads, reader: Mutex::default() })
    }

    fn reads(&self) -> usize {
        self.reads.swap(0, Ordering::SeqCst)
    }

    fn mark(&self) -> usize {
        self.mark.load(Ordering::SeqCst)
    }
}

impl Hook for Marked {
    fn poll_read(
        &mut self,
        io: &mut DuplexStream,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        *self.shared.reader.lock().unwrap() = Some(cx.waker().clone());
        let mut chunk = [0; 4096];
        let mut is_over = false;
        loop {
            let mut chunk = ReadBuf::new(&mut chunk);
            match Pin::new(&mut *io).poll_read(cx, &mut chunk) {
                Poll::Ready(Ok(())) if !chunk.filled().is_empty() => {
                    self.held.extend_from_slice(chunk.filled());
                }
                Poll::Ready(_) => is_over = true,
                Poll::Pending => {}
            }
            if chunk.filled().is_empty() {
                break;
            }
        }
        if !is_over && self.held.len() < self.shared.mark() {
            return Poll::Pending;
        }
        self.shared.reads.fetch_add(1, Ordering::SeqCst);
        let len = self.held.len().min(buffer.remaining());
        buffer.put_slice(&self.held[..len]);
        self.held.drain(..len);
        Poll::Ready(Ok(()))
    }

    fn ready_from(&self, bytes: usize) -> bool {
        if self.shared.knows_marks {
            self.shared.mark.store(bytes, Ordering::SeqCst);
            if let Some(reader) = self.shared.reader.lock().unwrap().take() {
                reader.wake();
            }
        }
        self.shared.knows_marks
    }
}

/// A server whose marker was taken a while ago.
async fn start(policy: BatchPolicy, knows_marks: bool) -> (Server, Arc<Shared>) {
    let shared = Shared::new(knows_marks);
    let marked = Marked { held: Vec::new(), shared: Arc::clone(&shared) };
    let mut server = Server::start_over(policy, Delivery::default(), marked).await;
    server.marker().await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    shared.reads();
    (server, shared)
}

/// Writes row after row while no time passes, and lets the task do what it can after each.
async fn write(server: &mut Server, rows: std::ops::RangeInclusive<u64>) {
    for row in rows {
        server.rows([row]).await;
        server.settle().await;
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

#[tokio::test(start_paused = true)]
async fn connection_under_load_is_read_once_per_pause() {
    for knows_marks in [false, true] {
        let (mut server, shared) = start(BatchPolicy::default(), knows_marks).await;
        write(&mut server, 1..=4).await;
        assert_eq!(shared.reads(), 4, "the first ones at once");
        write(&mut server, 5..=6).await;
        assert_eq!(shared.reads(), 0);
        let began = now();
        tokio::time::sleep(2 * MILLISECOND).await;
        assert_eq!((shared.reads(), now() - began), (1, 2 * MILLISECOND), "the rest at once");
        // The first one after a pause waits for nothing.
        tokio::time::sleep(100 * MILLISECOND).await;
        assert_eq!(server.batch().await.batch, [1, 2, 3, 4, 5, 6]);
        assert_eq!(shared.reads(), 0);
        write(&mut server, 7..=7).await;
        assert_eq!(shared.reads(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn connection_gathers_nothing_without_lingering() {
    let (mut server, shared) = start(impatient(), true).await;
    write(&mut server, 1..=12).await;
    assert_eq!((shared.reads(), shared.mark()), (12, 1));
}

#[tokio::test(start_paused = true)]
async fn connection_with_enough_for_a_read_is_read_before_the_pause_is_over() {
    let (mut server, shared) = start(patient(), true).await;
    write(&mut server, 1..=6).await;
    assert_eq!((shared.reads(), shared.mark()), (4, WINDOW as usize / 8));
    // An eighth of the window.
    write(&mut server, 7..=7).await;
    assert_eq!(shared.reads(), 1);
}

#[tokio::test(start_paused = true)]
async fn connection_with_a_full_window_is_read_at_once() {
    let (mut server, shared) = start(patient(), false).await;
    write(&mut server, 1..=3).await;
    // The fourth wake-up leaves less than an eighth of the window.
    server.rows(4..=18).await;
    server.settle().await;
    assert_eq!(shared.reads(), 4);
    write(&mut server, 19..=20).await;
    assert_eq!(shared.reads(), 2);
}

#[tokio::test(start_paused = true)]
async fn commands_and_the_end_of_a_task_do_not_wait_for_the_pause() {
    for knows_marks in [false, true] {
        let (mut server, shared) = start(patient(), knows_marks).await;
        write(&mut server, 1..=6).await;
        assert_eq!(shared.reads(), 4, "two rows gather");
        let began = now();
        server.commands.send(Command::FetchMap).unwrap();
        assert_eq!(server.receive().await.0, Opcode::GET_CLUSTER_CONFIG);
        assert_eq!(now(), began);
        server.cancel.cancel();
        assert!(server.reports.recv().await.is_none());
        assert_eq!(now(), began);
        assert_eq!(shared.mark(), 1, "whoever has the connection next reads at once");
    }
}

#[tokio::test(start_paused = true)]
async fn connection_that_is_lost_during_a_pause_is_read_to_its_end() {
    for knows_marks in [false, true] {
        let (mut server, _) = start(patient(), knows_marks).await;
        write(&mut server, 1..=6).await;
        server.peer.io.shutdown().await.unwrap();
        let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
        assert_eq!(error.kind(), ErrorKind::ConnectionLost);
        assert_eq!(server.batch().await.batch, [1, 2, 3, 4, 5, 6]);
    }
}
