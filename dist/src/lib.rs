//! placeholder
pub mod error;
pub mod mesh;
pub use error::{Error, Kind, Result};
pub use mesh::{Axis, AxisSet, Mesh};
