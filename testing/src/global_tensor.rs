//! A tensor on the host, its test values, and its distribution over the ranks of a mesh.

use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::{DType, Dims, Strides};
use shardgrad_tensor::ops::Input;
use shardgrad_tensor::{Layout, LocalTensor, Placement, Tensor};
use std::panic::Location;

/// A global tensor on the host: shape, dtype and elements, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct GlobalTensor {
    /// The dtype.
    pub dtype: DType,
    /// The shape.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<f64>,
}

/// One of 64 odd multiples of 1/32 between -2 and 2: small sums and products of them are exact.
fn fraction(seed: u64, place: u64) -> f64 {
    (2.0 * (mixed(seed, place) % 64) as f64 - 63.0) / 32.0
}

/// A pseudorandom number (the finaliser of SplitMix64, Steele and others 2014).
fn mixed(seed: u64, place: u64) -> u64 {
    let mut z =
        seed.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl GlobalTensor {
    /// Draws an argument for a test: the same elements for the same seed.
    #[must_use]
    pub fn draw(input: &Input, seed: u64) -> GlobalTensor {
        let shape = input.shape().to_vec();
        let places = 0..shape.iter().product::<usize>() as u64;
        let (dtype, data) = match input {
            Input::Real(_) => (DType::F64, places.map(|i| fraction(seed, i)).collect()),
            Input::Positive(_) => (DType::F64, places.map(|i| 1.5 + fraction(seed, i) / 2.0).collect()),
            Input::Offset(_, centre) => (DType::F64, places.map(|i| centre + fraction(seed, i)).collect()),
            Input::Distinct(_) => {
                let mut order: Vec<u64> = places.clone().collect();
                order.sort_unstable_by_key(|i| mixed(seed, *i));
                (DType::F64, order.iter().map(|&i| i as f64 / 8.0 - places.end as f64 / 16.0).collect())
            }
            Input::Index(_, bound) => {
                (DType::I64, places.map(|i| (mixed(seed, i) % *bound as u64) as f64).collect())
            }
            Input::Bool(_) => (DType::Bool, places.map(|i| (mixed(seed, i) % 2) as f64).collect()),
        };
        GlobalTensor { dtype, shape, data }
    }

    pub(crate) fn of(layout: &Layout, data: Vec<f64>) -> GlobalTensor {
        GlobalTensor { dtype: layout.dtype(), shape: layout.shape().to_vec(), data }
    }

    /// Distributes the tensor: this rank's local tensor under a layout. On partial axes the ranks get random-looking
    /// terms that add up to the value.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[doc(alias = "distribute_tensor")]
    pub fn distribute(&self, rank: &Rank, layout: &Layout) -> Result<Tensor> {
        let layout = layout.with_dtype(self.dtype);
        let pending = layout.partial();
        let (members, me) = (rank.mesh().group_size(pending) as u64, rank.group_rank(pending) as u64);
        let noise = |at: usize, member: u64| {
            let x = fraction(at as u64, member + 1);
            if self.dtype.is_float() { x } else { (x * 4.0).trunc() }
        };
        let part = |at: usize| match me {
            _ if me + 1 < members => noise(at, me),
            _ => self.data[at] - (0..members - 1).map(|m| noise(at, m)).sum::<f64>(),
        };
        let values: Vec<f64> = places(&layout, rank).into_iter().map(part).collect();
        let local = LocalTensor::upload(rank, &layout.local_shape(rank.coordinates()), &values)?;
        let local = if self.dtype == DType::F64 { local } else { local.to_dtype(rank, self.dtype)? };
        Ok(Tensor::assemble(rank, layout, local))
    }

    /// As [`GlobalTensor::distribute`], but as a strided view with gaps whose first dim is the fastest, so that no
    /// two neighbours of a row are adjacent. The gaps hold NaN, or an invalid index.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    pub fn distribute_strided(&self, rank: &Rank, layout: &Layout) -> Result<Tensor> {
        let dense = self.distribute(rank, layout)?;
        let shape = dense.local().view.shape.clone();
        let (mut strides, mut step) = (Dims::new(), 2);
        for &n in &shape {
            strides.push(step);
            step *= n.max(1) + 1;
        }
        let gap = if self.dtype.is_float() { f64::NAN } else { 77.0 };
        let mut local = LocalTensor::full(rank, self.dtype, &[step + 1], gap)?;
        let view = Strides::new(shape, strides, 1);
        local.write(rank, view.clone(), dense.local())?;
        Ok(Tensor::assemble(rank, dense.layout().clone(), local.with_view(view)))
    }

    /// Whether every element is a multiple of 2^-24 below 2^24: results of small binary fractions without rounding.
    #[must_use]
    pub fn is_dyadic(&self) -> bool {
        let unit = f64::from(1 << 24);
        self.data.iter().all(|x| x.abs() < unit && (x * unit).fract() == 0.0)
    }

    /// Returns where this rank's part of a tensor differs from this one by more than `tolerance` (1 + |element|), if
    /// anywhere. A collective call: partial sums are reduced first.
    ///
    /// # Errors
    /// Errors of the collectives.
    pub fn find_mismatch(
        &self,
        x: &Tensor,
        tolerance: f64,
        site: &'static Location<'static>,
    ) -> Result<Option<String>> {
        let (rank, mut whole) = (x.rank(), x.layout().clone());
        if x.shape().as_slice() != self.shape || x.dtype() != self.dtype {
            return Ok(Some(format!("is {} instead of {}{:?}", x.layout(), self.dtype, self.shape)));
        }
        for axis in x.layout().partial().iter() {
            whole = whole.with_placement(axis, Placement::Invariant);
        }
        let got = x.to_layout_at(&whole, site)?.to_local_f64()?;
        let same = |got: f64, want: f64| {
            let near = (got - want).abs() <= tolerance * (1.0 + want.abs());
            got == want || (got.is_nan() && want.is_nan()) || near
        };
        let wrong = places(&whole, rank).into_iter().zip(&got).find(|&(at, &got)| !same(got, self.data[at]));
        Ok(wrong.map(|(at, got)| format!("is {got} instead of {} at global element {at}", self.data[at])))
    }
}

/// Returns the row-major global index of each local element.
fn places(layout: &Layout, rank: &Rank) -> Vec<usize> {
    let mut places = vec![0];
    for d in 0..layout.ndim() {
        let range = layout.range(d, rank.coordinates());
        places = places.iter().flat_map(|at| range.clone().map(move |i| at * layout.extent(d) + i)).collect();
    }
    places
}
