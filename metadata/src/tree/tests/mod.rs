//! The tree's tests: a contract over every engine, a model, the bucket's side, and crashes.

mod world;
mod contract;
mod model;
mod import;
mod ownership;
mod garbage;
mod segments;
mod fsck;
mod dump;
mod adopt;
mod sharing;
mod copies;
mod moves;
mod clone;
mod clone_histories;
mod cloning;
mod trash;
mod quota;
mod lost;
mod large;
mod crash;
mod doubts;
mod lapses;
mod damaged;
mod following;
mod remote;
