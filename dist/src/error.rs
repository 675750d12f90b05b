//! The one public error of shardgrad, and the two ways in which it leaves a function.
//!
//! Whatever opens, parses, launches, loads or saves returns `Result`. Misuse inside an op, a backward pass or
//! a step unwinds with the [`Error`] as payload ([`Error::raise`]), so that model code stays free of `?`;
//! [`World::run`](crate::World::run) catches it, releases the other ranks and returns it.

mod coded;

use std::fmt;
use std::panic::Location;

/// What sort of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Extents that do not fit together.
    Shape,
    /// Dtypes that do not fit together.
    DType,
    /// Layouts that an op refuses.
    Layout,
    /// A mesh that cannot be.
    Mesh,
    /// A device that is missing or failed.
    Device,
    /// Ranks that called different collectives, or wait for each other in a circle.
    Collective,
    /// A rank that left while others waited for it, failed, fell silent, or sent a malformed message.
    PeerLost,
    /// A wait that outlasted its limit.
    Timeout,
    /// Memory that could not be had.
    OutOfMemory,
    /// Something this build or back end does not do.
    Unsupported,
    /// A model or checkpoint folder that cannot be read or written.
    Checkpoint,
    /// An option or a configuration value that makes no sense.
    Config,
    /// Data that cannot be used.
    Data,
    /// Ranks that hold or were told different things where they should be alike.
    Diverged,
    /// A number that is not finite where it has to be.
    NotFinite,
    /// A stop that was asked for from outside (SIGINT).
    Interrupted,
    /// The operating system refused.
    Io,
    /// A panic in user code, with its text.
    Panic,
}

/// An error with its kind, a message of one line, details of one line each, and the user's line.
#[derive(Clone)]
pub struct Error(Box<Facts>);

#[derive(Clone)]
struct Facts {
    kind: Kind,
    message: String,
    details: Vec<(&'static str, String)>,
    site: Option<&'static Location<'static>>,
}

impl Error {
    /// An error without details.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error(Box::new(Facts { kind, message: message.into(), details: Vec::new(), site: None }))
    }

    /// Adds a labelled line (`signature`, `arg 0`, `at`, `help`, ...); lines print in the order added.
    #[must_use]
    pub fn detail(mut self, label: &'static str, text: impl Into<String>) -> Error {
        self.0.details.push((label, text.into()));
        self
    }

    /// Names the line of user code that asked, if none is named yet.
    #[must_use]
    pub fn at(mut self, site: &'static Location<'static>) -> Error {
        self.0.site.get_or_insert(site);
        self
    }

    /// Names the line of user code that asked, in the place of a line that is named already.
    #[must_use]
    pub fn asked_by(mut self, site: &'static Location<'static>) -> Error {
        self.0.site = Some(site);
        self
    }

    /// What sort of error this is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.0.kind
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

    /// The user's line, where known.
    #[must_use]
    pub fn site(&self) -> Option<&'static Location<'static>> {
        self.0.site
    }

    /// Unwinds to the rank boundary with this error. No panic hook runs, nothing is printed.
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
        let error = Error::new(kind, e.to_string());
        match e {
            shardgrad_kernels::KernelError::Library { help, .. } => error.detail("help", help),
            _ => error,
        }
    }
}

/// The result type of everything in shardgrad that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
