//! Short forms for calls, buffers and worlds of both kinds.

use shardgrad_dist::{AxisSet, Call, Error, Kind, Mesh, Origin, Phase, Process, Rank, Result, World};
use shardgrad_kernels::{Buffer, Cpu, DType, Element, download, upload};
use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::panic::Location;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Parses a mesh.
pub(crate) fn mesh(text: &str) -> Mesh {
    Mesh::parse(text).unwrap()
}

/// The set of the axes named in a text like `dp,tp`.
pub(crate) fn axes(mesh: &Mesh, names: &str) -> AxisSet {
    names.split(',').filter(|n| !n.is_empty()).map(|n| mesh.axis(n).expect("a known axis")).collect()
}

/// A forward call over some axes, with the caller's line as its site.
#[track_caller]
pub(crate) fn over(axes: AxisSet, dtype: DType) -> Call<'static> {
    Call { axes, dtype, phase: Phase::Forward, path: "", origin: Origin::default(), site: Location::caller() }
}

/// An f32 call over the axes named in a text.
#[track_caller]
pub(crate) fn on(rank: &Rank, names: &str) -> Call<'static> {
    over(axes(rank.mesh(), names), DType::F32)
}

/// Uploads host values to a buffer of the rank.
pub(crate) fn up<T: Element>(rank: &Rank, data: &[T]) -> Buffer {
    upload(&**rank.backend(), data).unwrap()
}

/// Downloads the first `len` elements of a CPU buffer.
pub(crate) fn down<T: Element>(buffer: &Buffer, len: usize) -> Vec<T> {
    download(&*Cpu::backend(1), buffer, len).unwrap()
}

/// Hashes a number to a pseudo-random number.
pub(crate) fn hash(x: u64) -> u64 {
    let z = x.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D;
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Whether ranks are threads or processes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RankKind {
    /// Threads that share memory.
    Threads,
    /// Processes that share nothing. In these tests each is a thread that joins the world by itself.
    Processes,
}

pub(crate) const RANK_KINDS: [RankKind; 2] = [RankKind::Threads, RankKind::Processes];

impl RankKind {
    /// Runs a program on a mesh with the default settings.
    pub(crate) fn run<T: Send>(self, text: &str, f: impl Fn(&Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
        self.launch(text, |world| world, f)
    }

    /// Runs a program on a mesh with the settings of `set_up`.
    pub(crate) fn launch<T: Send>(
        self,
        text: &str,
        set_up: impl Fn(World) -> World + Sync,
        f: impl Fn(&Rank) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let world = || set_up(World::new(mesh(text)));
        if self == RankKind::Threads {
            return world().launch(f);
        }
        let ends = joined(mesh(text).num_ranks(), |process| world().join(process, &f));
        // One rank returns the cause; the errors of the others end in "stops too".
        let is_cause = |end: &&Result<T>| end.as_ref().is_err_and(|e| !e.message().ends_with(" stops too"));
        if let Some(Err(cause)) = ends.iter().find(is_cause) {
            return Err(cause.clone());
        }
        ends.into_iter().collect()
    }
}

/// Runs a test on each case, eight at a time: the ranks of a case wait most of the time.
pub(crate) fn in_parallel<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    let cases = Mutex::new(cases.into_iter().collect::<Vec<T>>().into_iter());
    let next = || cases.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(case) = next() {
                    test(case);
                }
            });
        }
    });
}

/// Runs a faulty program on ranks of each kind. Returns the error of the world, and the error kind of each rank.
pub(crate) fn faults(
    text: &str,
    program: impl Fn(&Rank) -> Result<()> + Sync,
) -> [(Error, Vec<Option<Kind>>); 2] {
    RANK_KINDS.map(|kind| {
        let ends = Mutex::new(vec![None; mesh(text).num_ranks()]);
        let start = Instant::now();
        let cause = kind.run(text, |rank| {
            let end = program(rank);
            ends.lock().unwrap()[rank.index()] = end.as_ref().err().map(Error::kind);
            end
        });
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(3), "{kind:?}: the ranks were released after {waited:?}");
        (cause.unwrap_err(), ends.into_inner().unwrap())
    })
}

/// Runs `one` for each of `count` processes that connect at a free port. Returns the results by rank.
pub(crate) fn joined<T: Send>(count: usize, one: impl Fn(&Process) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let process = Process::new(rank, count, "127.0.0.1", port).unwrap();
            let one = &one;
            scope.spawn(move || one(&process))
        };
        let started: Vec<_> = (0..count).map(start).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A free port below the range of ephemeral ports, so that no other program gets it by chance.
pub(crate) fn free_port() -> u16 {
    loop {
        let port = 10_000 + (RandomState::new().hash_one(0) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
