//! A parameter: declared by a layer, named and placed by a model.

use crate::name::key;
use shardgrad_autograd::{Key, Tape, Var};
use shardgrad_tensor::{Axis, Context, DType, Error, Kind, Layout, Rank, Result, Tensor, Value};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

/// How fresh values are drawn. They depend on seed, name and global element index only, so not on the mesh.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// 0 everywhere.
    Zeros,
    /// 1 everywhere.
    Ones,
    /// Normal numbers of mean 0 and this standard deviation.
    Normal(f64),
    /// Uniform numbers between plus and minus this bound.
    Uniform(f64),
    /// Whole numbers between plus and minus this bound, all as likely: sums of their products are exact, so that runs on
    /// different meshes can be compared bit for bit.
    Integers(u32),
}

/// A parameter. Cloning copies the handle: two layers that hold clones of one parameter share it, and it has the name
/// under which it is met first.
#[derive(Clone)]
pub struct Param(Rc<Inner>);

struct Inner {
    declared: Declared,
    placed: RefCell<Option<Placed>>,
    frozen: Cell<bool>,
}

#[derive(Clone, Debug)]
struct Declared {
    shape: Vec<usize>,
    file_shape: Option<Vec<usize>>,
    /// The order in which files hold the dims, where it is another one.
    file_order: Option<Vec<usize>>,
    init: Init,
    /// Dims of which no rank may be left without a part, and what they count.
    never_empty: Vec<(usize, &'static str)>,
}

struct Placed {
    name: Rc<str>,
    key: Key,
    layout: Layout,
    /// Nothing is here before the parameter is filled, on ranks where it does not live, and after an update that failed.
    stored: Option<Tensor>,
    computed: Option<Layout>,
    home: Option<Home>,
}

/// Where along a pipeline axis a parameter lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    /// The axis, of the world's mesh.
    pub(crate) axis: Axis,
    /// The places that hold it, in order.
    pub(crate) places: Vec<usize>,
    /// The place of this rank.
    pub(crate) here: usize,
}

impl Param {
    /// A parameter of a global shape, initially zero.
    #[must_use]
    pub fn new(shape: &[usize]) -> Param {
        Param::declare(Declared {
            shape: shape.to_vec(),
            file_shape: None,
            file_order: None,
            init: Init::Zeros,
            never_empty: Vec::new(),
        })
    }

    fn declare(declared: Declared) -> Param {
        Param(Rc::new(Inner { declared, placed: RefCell::default(), frozen: Cell::new(false) }))
    }

    fn change(self, change: impl FnOnce(&mut Declared)) -> Param {
        let mut declared = self.0.declared.clone();
        change(&mut declared);
        Param::declare(declared)
    }

    /// The same declaration with other initial values.
    #[must_use]
    pub fn init(self, init: Init) -> Param {
        self.change(|d| d.init = init)
    }

    /// The same declaration with another shape in files (as many elements in the same order).
    #[must_use]
    pub fn file_shape(self, shape: &[usize]) -> Param {
        debug_assert_eq!(
            shape.iter().product::<usize>(),
            self.shape().iter().product::<usize>(),
            "a file shape has as many elements as the parameter"
        );
        self.change(|d| d.file_shape = Some(shape.to_vec()))
    }

    /// The same declaration, whose dims lie in another order in files: dim i there is dim `order[i]` here. The file shape,
    /// if it is declared, is that of the result.
    #[must_use]
    pub fn file_order(self, order: &[usize]) -> Param {
        debug_assert_eq!(order.len(), self.shape().len(), "an order names every dim");
        self.change(|d| d.file_order = Some(order.to_vec()))
    }

    /// The same declaration, whose dim `dim` counts `things` (heads) of which every rank must have one at least.
    #[must_use]
    pub fn never_empty(self, dim: usize, things: &'static str) -> Param {
        self.change(|d| d.never_empty.push((dim, things)))
    }

    /// The global shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.0.declared.shape
    }

    /// The shape in files.
    #[must_use]
    pub fn shape_in_files(&self) -> Vec<usize> {
        let Declared { shape, file_shape, file_order, .. } = &self.0.declared;
        match (file_shape, file_order) {
            (Some(declared), _) => declared.clone(),
            (None, Some(order)) => order.iter().map(|d| shape[*d]).collect(),
            (None, None) => shape.clone(),
        }
    }

    /// The stored tensor with its dims in the order of files.
    #[track_caller]
    pub(crate) fn as_in_files(&self) -> Tensor {
        self.in_file_order(self.tensor())
    }

    /// A tensor that lies as the stored one, with its dims in the order of files.
    #[track_caller]
    pub(crate) fn in_file_order(&self, tensor: Tensor) -> Tensor {
        match &self.0.declared.file_order {
            Some(order) => tensor.permute(order),
            None => tensor,
        }
    }

    /// A tensor that lies as [`Param::as_in_files`], as the stored one lies.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[track_caller]
    pub(crate) fn out_of_file_order(&self, tensor: Tensor) -> Result<Tensor> {
        let Some(order) = &self.0.declared.file_order else { return Ok(tensor) };
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(i, d)| back[*d] = i);
        tensor.permute(&back).contiguous()
    }

    /// Puts a tensor that lies as [`Param::as_in_files`] in the place of the stored one.
    ///
    /// # Errors
    /// As [`Param::set_tensor`].
    #[track_caller]
    pub(crate) fn set_from_files(&self, tensor: Tensor) -> Result<()> {
        self.set_tensor(self.out_of_file_order(tensor)?)
    }

    /// The global number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether weight decay applies: to what has two or more dims in files.
    #[must_use]
    pub fn decays(&self) -> bool {
        self.shape_in_files().len() >= 2
    }

    /// How fresh values are drawn.
    #[must_use]
    pub fn initial(&self) -> Init {
        self.0.declared.init
    }

    /// Whether gradients pass it by.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.0.frozen.get()
    }

    /// Takes the parameter out of training, or back in.
    pub fn set_frozen(&self, frozen: bool) {
        self.0.frozen.set(frozen);
    }

    /// Whether two handles name one parameter.
    #[must_use]
    pub fn same_as(&self, other: &Param) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// The parameter on the tape of a variable, in the layout in which it is computed with.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if no model has placed it.
    #[track_caller]
    #[must_use]
    pub fn on(&self, x: &Var) -> Var {
        self.on_tape(x.tape())
    }

    /// The parameter on a tape, as [`Param::on`].
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if no model has placed it.
    #[track_caller]
    #[must_use]
    pub fn on_tape(&self, tape: &Tape) -> Var {
        let site = Location::caller();
        let (key, stored, computed) = self.with(site, |placed| {
            Context::of(tape.rank()).set_path(&placed.name);
            let stored = match tape.is_outline() {
                true => Tensor::outline(tape.rank(), &placed.layout),
                false => placed.held().clone(),
            };
            (placed.key, stored, placed.computed.clone())
        });
        let leaf = tape.leaf(key, &stored);
        // A leaf all the same: its other layouts are made once a step.
        let leaf = if self.is_frozen() && !tape.is_outline() { leaf.detach() } else { leaf };
        match computed {
            Some(layout) => leaf.to_layout(&layout),
            None => leaf,
        }
    }

    /// The dotted name.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if no model has placed it; so do the methods below.
    #[track_caller]
    #[must_use]
    pub fn name(&self) -> String {
        self.with(Location::caller(), |placed| placed.name.to_string())
    }

    /// The dotted name, shared.
    #[track_caller]
    pub(crate) fn path(&self) -> Rc<str> {
        self.with(Location::caller(), |placed| placed.name.clone())
    }

    /// What it is called on tapes and in [`Gradients`](shardgrad_autograd::Gradients): counted over all models of the
    /// rank, in the order of traversal.
    #[track_caller]
    #[must_use]
    pub fn key(&self) -> Key {
        self.with(Location::caller(), |placed| placed.key)
    }

    /// How it is stored.
    #[track_caller]
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.with(Location::caller(), |placed| placed.layout.clone())
    }

    /// Whether this rank holds it: on a pipeline only the stages that use a parameter do.
    #[track_caller]
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.home().is_none_or(|home| home.places.contains(&home.here))
    }

    /// Whether this rank is of the first stage that holds it, the one that counts it and saves it.
    #[track_caller]
    #[must_use]
    pub fn counts_here(&self) -> bool {
        self.home().is_none_or(|home| home.places.first() == Some(&home.here))
    }

    /// Where along a pipeline it lives.
    #[track_caller]
    pub(crate) fn home(&self) -> Option<Home> {
        self.with(Location::caller(), |placed| placed.home.clone())
    }

    /// The stored tensor.
    ///
    /// # Panics
    /// Also where it is not here.
    #[track_caller]
    #[must_use]
    pub fn tensor(&self) -> Tensor {
        self.with(Location::caller(), |placed| placed.held().clone())
    }

    /// The layout in which it is computed with, its dtype included, where that is not the stored one.
    #[track_caller]
    #[must_use]
    pub fn computed(&self) -> Option<Layout> {
        self.with(Location::caller(), |placed| placed.computed.clone())
    }

    /// Puts another value in the place of the stored tensor.
    ///
    /// # Errors
    /// `Kind::Layout` if it lies otherwise than the stored tensor.
    #[track_caller]
    pub fn set_tensor(&self, tensor: Tensor) -> Result<()> {
        let (name, layout) = self.with(Location::caller(), |p| (p.name.clone(), p.layout.clone()));
        if layout != *tensor.layout() {
            let text = format!("parameter `{name}` is stored as {layout} but was given {}", tensor.layout());
            return Err(Error::new(Kind::Layout, text).at(Location::caller()));
        }
        let mut placed = self.0.placed.borrow_mut();
        placed.as_mut().ok_or_else(unplaced)?.stored = Some(tensor);
        Ok(())
    }

    /// Replaces the stored tensors of several parameters by a function of them, which gets the only handles that the model has. They
    /// come back in their order, whatever became of it.
    pub(crate) fn update_all<'a>(
        params: impl Iterator<Item = &'a Param> + Clone,
        change: impl FnOnce(Vec<Tensor>) -> (Vec<Tensor>, Result<()>),
    ) -> Result<()> {
        let take = |param: &Param| {
            let mut placed = param.0.placed.borrow_mut();
            let placed = placed.as_mut().ok_or_else(unplaced)?;
            placed.stored.take().ok_or_else(|| lost(&placed.name))
        };
        let stored = params.clone().map(take).collect::<Result<Vec<Tensor>>>()?;
        let (changed, done) = change(stored);
        for (param, tensor) in params.zip(changed) {
            param.0.placed.borrow_mut().as_mut().ok_or_else(unplaced)?.stored = Some(tensor);
        }
        done
    }

    /// Copies the stored tensor where somebody else holds its memory, so that it can be changed in place.
    pub(crate) fn own(&self) -> Result<()> {
        let own = |mut tensors: Vec<Tensor>| {
            let done = tensors.iter_mut().try_for_each(Tensor::own);
            (tensors, done)
        };
        Param::update_all(std::iter::once(self), own)
    }

    /// Forgets a value that is one of no step.
    pub(crate) fn lose(&self) {
        if let Some(placed) = self.0.placed.borrow_mut().as_mut() {
            placed.stored = None;
        }
    }

    /// Names the parameter and says how it lies, without a value as yet.
    ///
    /// # Errors
    /// `Kind::Config` if a model has it already.
    pub(crate) fn place(
        &self,
        name: &str,
        key: Key,
        (layout, computed): (Layout, Option<Layout>),
    ) -> Result<()> {
        let mut placed = self.0.placed.borrow_mut();
        if let Some(before) = placed.as_ref() {
            let text = format!("parameter `{name}` is `{}` of another model already", before.name);
            return Err(
                Error::new(Kind::Config, text).detail("help", "build each model from layers of its own")
            );
        }
        *placed = Some(Placed { name: name.into(), key, layout, stored: None, computed, home: None });
        Ok(())
    }

    /// Says where along a pipeline it lives.
    pub(crate) fn settle(&self, home: Option<Home>) {
        if let Some(placed) = self.0.placed.borrow_mut().as_mut() {
            placed.home = home;
        }
    }

    /// Draws the first value, if the parameter lives here.
    #[track_caller]
    pub(crate) fn fill(&self, rank: &Rank, seed: u64, home: Option<Home>) -> Result<()> {
        self.settle(home);
        if !self.is_here() {
            return Ok(());
        }
        let (layout, site) = (self.layout(), Location::caller());
        let drawn = draw(self, &layout, rank, key(seed, &self.name())).map_err(|error| match error.kind() {
            Kind::OutOfMemory => error
                .detail("parameter", format!("{}: {layout}", self.name()))
                .detail("help", "split it over more ranks, store it in fewer bits, or raise the limit")
                .at(site),
            _ => error.at(site),
        });
        self.set_tensor(drawn?)
    }

    /// Refuses a layout that leaves a rank without a part of what it must have.
    pub(crate) fn check_parts(&self, layout: &Layout) -> Result<()> {
        for &(dim, things) in &self.0.declared.never_empty {
            let split = layout.dims()[dim];
            if split.axes.ways(layout.mesh()) > split.extent {
                let mesh = layout.mesh();
                let axes: Vec<String> =
                    split.axes.iter().map(|a| format!("{}={}", mesh.name(a), mesh.size(a))).collect();
                let text = format!("{} {things} cannot be split over {}", split.extent, axes.join(","));
                let help = format!("use a mesh that splits them over at most {} ranks", split.extent);
                return Err(Error::new(Kind::Config, text).detail("help", help));
            }
        }
        Ok(())
    }

    fn with<T>(&self, site: &'static Location<'static>, read: impl FnOnce(&Placed) -> T) -> T {
        match self.0.placed.borrow().as_ref() {
            Some(placed) => read(placed),
            None => unplaced().at(site).raise(),
        }
    }
}

impl Placed {
    fn held(&self) -> &Tensor {
        self.stored.as_ref().unwrap_or_else(|| match &self.home {
            Some(home) if !home.places.contains(&home.here) => elsewhere(&self.name, home).raise(),
            _ => lost(&self.name).raise(),
        })
    }
}

fn unplaced() -> Error {
    Error::new(Kind::Config, "a parameter is used that no model has placed")
        .detail("help", "make the layers, then Model::new(rank, layers, &plan, seed), and call the model")
}

fn elsewhere(name: &str, home: &Home) -> Error {
    let text =
        format!("parameter `{name}` lives on stage {:?} of the pipeline, not on {}", home.places, home.here);
    Error::new(Kind::Config, text).detail("help", "ask Param::is_here first")
}

fn lost(name: &str) -> Error {
    Error::new(Kind::Config, format!("parameter `{name}` was lost in an update that failed"))
        .detail("help", AFTER_LOSS)
}

/// What is left to do where parameters are lost.
pub(crate) const AFTER_LOSS: &str = "go on from the last model that was saved";

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.placed.borrow().as_ref() {
            Some(placed) => {
                write!(f, "Param({}: {})", placed.name, placed.layout)
            }
            None => write!(f, "Param({:?})", self.shape()),
        }
    }
}

/// Fresh values of a parameter.
#[track_caller]
fn draw(param: &Param, layout: &Layout, rank: &Rank, key: u64) -> Result<Tensor> {
    match param.initial() {
        Init::Zeros => Tensor::zeros(rank, layout),
        Init::Ones => Tensor::full(rank, layout, 1.0),
        Init::Normal(std) => Tensor::normal(rank, layout, key, 0, std),
        Init::Uniform(bound) => Tensor::uniform(rank, layout, key, 0, -bound, bound),
        Init::Integers(bound) => {
            let bound = f64::from(bound);
            // In f64, where the upper end is never reached; the cast to integers rounds towards zero.
            let wide = layout.with_dtype(DType::F64);
            let drawn = Tensor::uniform(rank, &wide, key, 0, 0.0, 2.0 * bound + 1.0)?;
            Ok(drawn.cast(DType::I64).cast(DType::F64).add_scalar(-bound).cast(layout.dtype()))
        }
    }
}
