// SPDX-License-Identifier: Apache-2.0
/*!
 * \file tile_permission.h
 * \brief The permission that Linux gives a process to use the tile registers of AMX.
 *
 * A CPU may have AMX, and the first instruction on a tile still ends a process that did not ask.
 * The permission holds for all threads, those that run already included, and for as long as the
 * process.
 */
#ifndef TVM_PAGEDKV_BASE_TILE_PERMISSION_H_
#define TVM_PAGEDKV_BASE_TILE_PERMISSION_H_

#include <set>
#include <string>

namespace pagedkv {

/*! \brief Asks Linux for tiles, at each call; returns 0, or the number of the error. */
int AskForTiles();

/*!
 * \brief The features of a CPU without those of AMX that the process may not use.
 *
 * Without "amx_tile" there are none of them. With it, and where `ask` returns an error, there are
 * none either, and a line on stderr says so, once per process.
 * \param ask As AskForTiles. It is called only if there is AMX in the features.
 */
std::set<std::string> PermittedFeatures(std::set<std::string> features, int (*ask)());

/*! \brief Why PermittedFeatures left AMX out the last time that it asked; "" if it did not. */
std::string TileRefusal();

}  // namespace pagedkv

#endif  // TVM_PAGEDKV_BASE_TILE_PERMISSION_H_
