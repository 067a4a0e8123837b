"""Clustering directions: k-means with cosine similarity."""

from prismlm.ops.spherical_kmeans.tiled import Clusters, spherical_kmeans

__all__ = ["Clusters", "spherical_kmeans"]
