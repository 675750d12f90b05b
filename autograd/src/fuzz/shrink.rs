//! The smallest program that goes wrong in the same way: steps, outputs, marks, axes and extents are taken away one by one.

use super::marks::Marks;
use super::program::{Place, Program, Step};
use shardgrad_dist::Mesh;
use shardgrad_tensor::DType;
use shardgrad_tensor::ops::Input;
use std::collections::BTreeSet;

/// So many smaller programs are tried at most.
const TRIES_MAX: usize = 3_000;

impl Program {
    /// The smallest program found of which `fails` still holds.
    #[must_use]
    pub fn shrunk(&self, fails: impl Fn(&Program) -> bool) -> Program {
        let (mut least, mut tries) = (self.clone(), 0);
        loop {
            let smaller = least.smaller().into_iter().find(|candidate| {
                tries += 1;
                tries <= TRIES_MAX && fails(candidate)
            });
            match smaller {
                Some(candidate) => least = candidate,
                None => return least,
            }
        }
    }

    /// Programs with one thing less.
    fn smaller(&self) -> Vec<Program> {
        let mut found = Vec::new();
        let outputs: Vec<Program> =
            self.outputs.iter().map(|p| Program { outputs: vec![*p], ..self.clone() }).collect();
        found.extend(outputs.into_iter().filter(|_| self.outputs.len() > 1));
        for step in (0..self.steps.len()).rev() {
            found.extend(self.without_step(step, None));
            let args = self.steps[step].args();
            found.extend(args.into_iter().filter_map(|arg| self.without_step(step, Some(arg))));
        }
        found.extend((0..self.inputs.len()).rev().filter_map(|i| self.without_input(i)));
        for at in 0..self.blocks.len() {
            let mut one = self.clone();
            let block = one.blocks.remove(at);
            found.push(one.clone());
            for part in [block.start + 1..block.end, block.start..block.end - 1] {
                let mut less = one.clone();
                less.blocks.extend((!part.is_empty()).then_some(part));
                found.push(less);
            }
        }
        found.extend(self.plainer());
        found.extend(self.smaller_meshes());
        found.extend(self.smaller_shapes());
        found
    }

    /// Without a step: what it made is replaced by a value, or goes with all that is made of it.
    fn without_step(&self, gone: usize, by: Option<Place>) -> Option<Program> {
        let mut less = self.clone();
        less.steps.remove(gone);
        let renamed = |p: Place| match p {
            Place::Made(step, _) if step == gone => by,
            Place::Made(step, out) if step > gone => Some(Place::Made(step - 1, out)),
            other => Some(other),
        };
        for at in gone..less.steps.len() {
            for arg in less.steps[at].args_mut() {
                *arg = renamed(*arg)?;
            }
        }
        less.outputs = less.outputs.iter().filter_map(|p| renamed(*p)).collect();
        if less.outputs.is_empty() {
            return None;
        }
        let moved = |at: usize| if at > gone { at - 1 } else { at };
        less.blocks =
            less.blocks.iter().map(|b| moved(b.start)..moved(b.end)).filter(|b| !b.is_empty()).collect();
        Some(less)
    }

    /// Without an input that nothing uses. The numbers of the others stay what they were, so the last ones go first.
    fn without_input(&self, gone: usize) -> Option<Program> {
        let used = self.steps.iter().flat_map(Step::args).chain(self.outputs.iter().copied());
        if used.into_iter().any(|p| p == Place::Input(gone)) {
            return None;
        }
        let mut less = self.clone();
        less.inputs.remove(gone);
        let rename = |p: &mut Place| {
            if let Place::Input(i) = p
                && *i > gone
            {
                *i -= 1;
            }
        };
        less.steps.iter_mut().flat_map(Step::args_mut).for_each(rename);
        less.outputs.iter_mut().for_each(rename);
        Some(less)
    }

    /// In f64, with plainer layouts, without places where gradients stop, with constants for leaves.
    fn plainer(&self) -> Vec<Program> {
        let mut found = Vec::new();
        if self.dtype != DType::F64 {
            found.push(Program { dtype: DType::F64, ..self.clone() });
        }
        for (i, feed) in self.inputs.iter().enumerate() {
            let whole = Marks::whole(feed.input.shape().len());
            let mut axes = self.axes();
            axes.push((String::new(), 0));
            for (axis, _) in &axes {
                let marks = if axis.is_empty() { whole.clone() } else { feed.marks.without(axis) };
                if marks != feed.marks {
                    let mut less = self.clone();
                    less.inputs[i].marks = marks;
                    found.push(less);
                }
            }
            if feed.is_leaf {
                let mut less = self.clone();
                less.inputs[i].is_leaf = false;
                found.push(less);
            }
        }
        for (at, step) in self.steps.iter().enumerate() {
            if let Step::Apply { is_quiet: true, .. } = step {
                let mut less = self.clone();
                if let Step::Apply { is_quiet, .. } = &mut less.steps[at] {
                    *is_quiet = false;
                }
                found.push(less);
            }
        }
        found
    }

    /// Names and sizes of the axes.
    fn axes(&self) -> Vec<(String, usize)> {
        let mesh = Mesh::parse(&self.mesh).expect("the mesh of a program that ran");
        mesh.axes().map(|a| (mesh.name(a).to_string(), mesh.size(a))).collect()
    }

    fn on_axes(&self, axes: &[(String, usize)], gone: Option<&str>) -> Program {
        let mut less = self.clone();
        less.mesh = axes.iter().map(|(name, size)| format!("{name}={size}")).collect::<Vec<_>>().join(",");
        if let Some(gone) = gone {
            less.inputs.iter_mut().for_each(|f| f.marks = f.marks.without(gone));
            for step in &mut less.steps {
                if let Step::Move(_, marks) = step {
                    *marks = marks.without(gone);
                }
            }
        }
        less
    }

    fn smaller_meshes(&self) -> Vec<Program> {
        let axes = self.axes();
        let mut found = Vec::new();
        for at in 0..axes.len() {
            let mut fewer = axes.clone();
            let (name, size) = fewer.remove(at);
            found.push(self.on_axes(&fewer, Some(&name)));
            for smaller in 2..size {
                let mut axes = axes.clone();
                axes[at].1 = smaller;
                found.push(self.on_axes(&axes, None));
            }
        }
        found
    }

    /// With a smaller extent wherever one stands now, so that what was equal stays equal.
    fn smaller_shapes(&self) -> Vec<Program> {
        let all: BTreeSet<usize> = self.inputs.iter().flat_map(|f| f.input.shape().to_vec()).collect();
        let mut found = Vec::new();
        for &old in all.iter().rev() {
            for new in [1, 2, old.saturating_sub(1)].into_iter().filter(|n| *n < old && *n > 0) {
                let mut less = self.clone();
                for feed in &mut less.inputs {
                    let shape = feed.input.shape().iter().map(|n| if *n == old { new } else { *n });
                    let shape: Vec<usize> = shape.collect();
                    feed.input = match &feed.input {
                        Input::Index(_, bound) => {
                            Input::Index(shape, if *bound == old { new } else { *bound })
                        }
                        other => other.with_shape(&shape),
                    };
                }
                found.push(less);
            }
        }
        found
    }
}
