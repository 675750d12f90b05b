//! The public error type of shardgrad.
//!
//! Functions that open, parse, launch, load or save return `Result`. Misuse inside an op, a backward pass or a training step unwinds
//! with the [`Error`] as panic payload ([`Error::raise`]), so that model code needs no `?`; [`World::run`](crate::World::run)
//! catches the payload, ends the other ranks and returns the error.

mod encoding;

use std::fmt;
use std::panic::Location;

/// The kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Shapes that do not match.
    Shape,
    /// Dtypes that do not match, or that an op does not support.
    DType,
    /// Layouts (shard, replicate, partial) that an op rejects.
    Layout,
    /// An invalid mesh.
    Mesh,
    /// A device that is missing or has failed.
    Device,
    /// Ranks that called different collectives, or that are deadlocked.
    Collective,
    /// A peer that returned while other ranks waited for it, failed, became unresponsive, or sent a malformed message.
    PeerLost,
    /// A wait that exceeded its timeout.
    Timeout,
    /// Memory that could not be allocated.
    OutOfMemory,
    /// A feature that this build or back end does not support.
    Unsupported,
    /// A model or checkpoint folder that cannot be read or written.
    Checkpoint,
    /// An invalid option or configuration value.
    Config,
    /// Data that cannot be used.
    Data,
    /// Ranks that hold or were given different values where all must have the same.
    Diverged,
    /// A NaN or infinity where a finite number is required.
    NotFinite,
    /// A stop requested by a signal (SIGINT) or the launcher.
    Interrupted,
    /// A failed call to the operating system.
    Io,
    /// A panic in user code, with its message.
    Panic,
}

/// The error of every fallible function of shardgrad: a kind, a one-line message, labelled details, and the line of user code that
/// made the failing call.
#[derive(Clone)]
pub struct Error(Box<ErrorData>);

#[derive(Clone)]
struct ErrorData {
    kind: Kind,
    message: String,
    details: Vec<(&'static str, String)>,
    site: Option<&'static Location<'static>>,
    /// Kind of another rank's error, of which this error is a consequence.
    cause: Option<Kind>,
}

impl Error {
    /// Creates an error without details.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error(Box::new(ErrorData {
            kind,
            message: message.into(),
            details: Vec::new(),
            site: None,
            cause: None,
        }))
    }

    /// Adds a labelled line (`signature`, `arg 0`, `at`, `help`, ...); lines print in the order added.
    #[must_use]
    pub fn detail(mut self, label: &'static str, text: impl Into<String>) -> Error {
        self.0.details.push((label, text.into()));
        self
    }

    /// Sets the line of user code that made the failing call, unless a line is set.
    #[must_use]
    pub fn at(mut self, site: &'static Location<'static>) -> Error {
        self.0.site.get_or_insert(site);
        self
    }

    /// Sets the line of user code that made the failing call, replacing a line that is set.
    #[must_use]
    pub fn replace_site(mut self, site: &'static Location<'static>) -> Error {
        self.0.site = Some(site);
        self
    }

    /// The kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The kind of the error that ended the world: of another rank's error if this rank stopped only because that rank failed, else
    /// [`Error::kind`].
    #[must_use]
    pub fn cause_kind(&self) -> Kind {
        self.0.cause.unwrap_or(self.0.kind)
    }

    /// Sets the kind of the error of which this error is a consequence.
    pub(crate) fn caused_by(mut self, cause: Kind) -> Error {
        self.0.cause = Some(cause);
        self
    }

    /// The first line, without details.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The labelled lines.
    #[must_use]
    pub fn details(&self) -> &[(&'static str, String)] {
        &self.0.details
    }

    /// The line of user code that made the failing call, if known.
    #[must_use]
    pub fn site(&self) -> Option<&'static Location<'static>> {
        self.0.site
    }

    /// Unwinds with this error as panic payload, up to the function that runs the rank. No panic hook runs; nothing is printed.
    pub fn raise(self) -> ! {
        std::panic::resume_unwind(Box::new(self))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        for (label, text) in &self.0.details {
            write!(f, "\n  {label:<10} {}", text.replace('\n', "\n             "))?;
        }
        if let Some(site) = self.0.site {
            write!(f, "\n  {:<10} {}:{}", "line", site.file(), site.line())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Error {
        Error::new(Kind::Io, e.to_string())
    }
}

impl From<shardgrad_kernels::KernelError> for Error {
    fn from(e: shardgrad_kernels::KernelError) -> Error {
        let kind = match e {
            shardgrad_kernels::KernelError::OutOfMemory { .. }
            | shardgrad_kernels::KernelError::HostMemory { .. } => Kind::OutOfMemory,
            shardgrad_kernels::KernelError::DType { .. } => Kind::DType,
            shardgrad_kernels::KernelError::Index { .. } => Kind::Data,
            shardgrad_kernels::KernelError::Library { .. }
            | shardgrad_kernels::KernelError::Unsupported { .. }
            | shardgrad_kernels::KernelError::NotCapturable { .. }
            | shardgrad_kernels::KernelError::CaptureOutputHeld { .. } => Kind::Unsupported,
            _ => Kind::Device,
        };
        let text = match e {
            // The other ranks, on other machines, repeat this text.
            shardgrad_kernels::KernelError::Device { lost_gpu: Some(gpu), .. } => {
                format!("GPU {gpu} of host {} failed: {e}", host_name())
            }
            _ => e.to_string(),
        };
        let error = Error::new(kind, text);
        match e {
            shardgrad_kernels::KernelError::Library { help, .. } => error.detail("help", help),
            _ => error,
        }
    }
}

/// The name of this machine; `unknown` if the system does not show it.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown" } else { name }.to_string()
}

/// The result type of fallible functions of shardgrad.
pub type Result<T, E = Error> = std::result::Result<T, E>;
